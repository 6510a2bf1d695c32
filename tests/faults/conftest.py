"""Tests of faults: each row of what a fault must end in, and where that is tested.

fault                                  end state                                     test
malformed, oversized, unknown frame    one ERROR: stable code, the field's path;     test_frames.py
                                       the peer dropped after K, others unaffected   ../ipc/test_wire_bad_frames.py
over the limits, unknown ids,          refused before queueing, naming value, limit  test_limits.py
parameters out of range                and knob                                      ../unit/test_serving.py
client killed, hung, cancelling        slot and blocks free within two steps;        test_clients.py, kill_soak.py
                                       nobody else's tokens change                   ../ipc/test_server_requests.py
slow client                            paused by credit, then ended; others' p99     test_clients.py
                                       within 5 %                                    bad_clients.py
more load than capacity                the queue bounded; `busy` within 10 ms        test_limits.py
server killed                          ServerGone with the tokens so far; a restart  test_server.py, kill_soak.py
                                       binds again, nothing stale
SIGTERM                                drained to a deadline, END(shutdown), exit 0  test_server.py
CUDA error                             every client told, exit non-zero in 1 s       test_server.py
hung step                              stacks dumped, exit non-zero                  test_server.py
NaN or infinity in logits              that request alone, by name and position      test_model.py
                                                                                     ../unit/test_lossless_endings.py
head missing or ill-fitting            the baseline with one warning; ConfigError    test_model.py
                                       if strict                                     ../unit/checkpoint/
out of memory                          only at start, with numbers and knobs         test_model.py
KV blocks exhausted                    cannot happen in a step                       test_model.py
                                                                                     ../unit/test_kvcache.py
hostile model directory                ConfigError: file, tensor, expected, found    test_model.py
                                                                                     ../unit/checkpoint/
many streams at once                   nothing lost, doubled or reordered            test_soaks.py, streams_soak.py

Scripts (*_soak.py) stand next to this folder; test_soaks.py runs them.
"""

from socket_fixtures import no_leaks, serve, soon, transport

__all__ = ["no_leaks", "serve", "soon", "transport"]
