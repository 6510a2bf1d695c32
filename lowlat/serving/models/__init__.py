"""This package serves several models: a process each, and a supervisor that shares the devices' memory among them.

tables      [[models]] of the server's file as settings of each
places      who holds memory, who is woken, and who sleeps for it
supervisor  the processes: started, restarted, put to sleep and woken
worker      a model's process as the supervisor's other end
roster      the models' states in a file, for gateways and commands
"""
