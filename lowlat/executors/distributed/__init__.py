"""This package runs one executor on several GPUs of a host that access each other's memory, and has the watchdog."""
