"""A client by libzmq's C interface, as in another language; LOWLAT_LIBZMQ names another build of it, 4.2 or newer."""

import ctypes
import os
import time
from importlib.metadata import files

import pytest
from fake_engine import FakeEngine, expected_tokens
from served import Serve

from lowlat.ipc.wire import End, Hello, Sampling, Submit, Tokens, decode_server, encode, pack_tokens, unpack_tokens

DEALER, RCVTIMEO, LINGER, SNDMORE = 5, 27, 17, 2


def library() -> ctypes.CDLL:
    """The named one, else pyzmq's own."""
    named = os.environ.get("LOWLAT_LIBZMQ")
    found = [named] if named else [str(one.locate()) for one in files("pyzmq") or () if one.name.startswith("libzmq-")]
    if not found:
        pytest.skip("pyzmq was built against a system's libzmq; LOWLAT_LIBZMQ names one")
    libzmq = ctypes.CDLL(found[0])
    libzmq.zmq_ctx_new.restype = libzmq.zmq_socket.restype = ctypes.c_void_p
    return libzmq


def test_a_client_in_c_is_served_and_answers_heartbeats(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.002), heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2, **transport)
    libzmq = library()
    context = ctypes.c_void_p(libzmq.zmq_ctx_new())
    socket = ctypes.c_void_p(libzmq.zmq_socket(context, DEALER))
    for option, value in ((RCVTIMEO, 5000), (LINGER, 0)):
        libzmq.zmq_setsockopt(socket, option, ctypes.byref(ctypes.c_int(value)), ctypes.c_size_t(4))
    assert libzmq.zmq_connect(socket, served.server.endpoint.encode()) == 0
    room = ctypes.create_string_buffer(1 << 16)

    def receive() -> object:
        size = libzmq.zmq_recv(socket, room, ctypes.c_size_t(len(room)), 0)
        assert size > 0
        return decode_server(room.raw[:size])

    def send(*frames: bytes) -> None:
        for place, frame in enumerate(frames, 1):
            more = SNDMORE if place < len(frames) else 0
            assert libzmq.zmq_send(socket, frame, ctypes.c_size_t(len(frame)), more) == len(frame)

    try:
        send(encode(Hello()))
        receive()
        for number in range(2):
            send(encode(Submit(number, 1 << 20, Sampling(max_tokens=50))), pack_tokens([7]))
            tokens: tuple[int, ...] = ()
            while not isinstance(message := receive(), End):
                assert isinstance(message, Tokens)
                tokens += unpack_tokens(message.token_ids)
            assert tokens == expected_tokens([7], 50)
            time.sleep(0.5 * (number == 0))  # several times as long as the silent are borne with
    finally:
        libzmq.zmq_close(socket)
        libzmq.zmq_ctx_term(context)
