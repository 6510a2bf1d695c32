"""This package serves several models in one process each; a supervisor shares the devices' memory among them.

tables      reads [[models]] of the server's file as settings of each model
places      decides which models are woken, and which sleep for them
supervisor  starts and restarts the processes, and tells them to sleep and to wake
worker      runs a model's process for the supervisor
roster      writes the models' states to a file, for gateways and commands
"""
