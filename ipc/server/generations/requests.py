"""This module handles the requests of a server from SUBMIT to END: admission, fairness, credit, deadlines."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowlat.ipc.engine import Codec, Engine, EngineOutput
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.fair_queue import RankedQueue
from lowlat.ipc.server.generations.open_prompts import OpenPrompts
from lowlat.ipc.server.generations.prepare import MAX_INLINE_BYTES, TextThreads, prepare
from lowlat.ipc.server.generations.residence import Keeper, Residence
from lowlat.ipc.server.generations.sender import Sender
from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.streams import Phase, Stream
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.generations.user_shares import UserShares
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.server.threads.events import (
    Command,
    DecodeCancel,
    DecodePause,
    DecodeSubmit,
    PauseDone,
    Prepare,
    Prepared,
    Refused,
    Step,
)
from lowlat.ipc.server.threads.watchdog import StepClock
from lowlat.ipc.wire import Error, FinishReason, Paused, Submit

__all__ = ["Requests"]

MAX_PROMPTS = 16  # waiting prompts may take this many times max_message_bytes
MIN_RETRY_MS, MAX_RETRY_MS = 50, 30_000


class Requests:
    """All requests under way; used only under the I/O thread's lock.

    At most `info.max_running` requests are inside the engine, so that limits, turns and `busy` never wait for a step.
    Paused requests do not count, nor those that lose their slots to a higher priority. A request that ends early
    (cancelled, gone, late) counts until the engine reports its end. A user has turns, and with several users a share of
    the places, over all its connections together.

    shared   several users are admitted
    keeper   shares the device's memory with other servers; None: this server alone uses it
    """

    def __init__(
        self,
        engine: Engine,
        codec: Codec | None,
        limits: Limits,
        timers: Timers,
        statistics: Statistics,
        clock: StepClock,
        peers: Peers,
        log: logging.Logger,
        *,
        epoch: str,
        decode: Callable[[Command], None],
        text_threads: TextThreads,
        shared: bool,
        keeper: Keeper | None = None,
    ) -> None:
        self._engine = engine
        self._info = engine.info
        self._codec = codec
        self._limits = limits
        self._timers = timers
        self._statistics = statistics
        self._clock = clock
        self._log = log
        self._decode = decode
        self._text_threads = text_threads
        self._prefix = epoch[:12]
        self._num_ids = 0
        self._num_preparing = 0
        self._queue: RankedQueue[Stream] = RankedQueue()
        self._inside: dict[str, Stream] = {}
        self._shares = UserShares(MAX_PROMPTS * limits.max_message_bytes, shared=shared)
        self._num_paused = 0  # paused requests inside the engine
        self._dirty: list[Stream] = []
        self._peers = peers
        self._sender = Sender(
            peers, statistics, timers, limits.slow_consumer_s, finish=self._end_decoded, starve=self._starved
        )
        peers.tell(self)
        self.engine_figures: Mapping[str, Any] = {}
        self.draining = False
        self.open_prompts = OpenPrompts(
            self, codec, limits, engine.info.max_context, timers, peers, decode, text_threads
        )
        self.residence = Residence(self, decode, timers, limits.max_wake_s, keeper)

    @property
    def state(self) -> str:
        """The state for a PONG."""
        return "draining" if self.draining else str(self.residence.state)

    @property
    def num_running(self) -> int:
        """Requests inside the engine."""
        return len(self._inside)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, those in the text thread included."""
        return self._queue.num_items + self._num_preparing

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._shares.num_live

    def submit(self, peer: Peer, submit: Submit, body: bytes, size: int) -> None:
        """Take a request, or refuse it at once; size: the bytes of its message."""
        self._statistics.num_requests += 1
        limits = self._limits
        num_free = limits.max_queue + self._info.max_running - self.num_waiting - self.num_running
        if self.draining:
            self.refuse(peer, submit.number, "draining", "the server is about to end and takes no new requests")
        elif submit.credit > limits.max_credit:
            message = f"credit {submit.credit} exceeds {limits.max_credit} (max_credit)"
            self.refuse(peer, submit.number, "invalid", message, field="$.credit")
        elif len(peer.streams) >= limits.max_requests_per_client:
            message = f"this client has {len(peer.streams)} requests under way (max_requests_per_client)"
            self.refuse(peer, submit.number, "busy", message)
        elif num_free <= 0:
            message = f"{self.num_waiting} requests wait for a slot (max_queue {limits.max_queue})"
            self.refuse(peer, submit.number, "busy", message)
        elif self._shares.is_full(peer.user.account, num_free):
            num_own = self._shares.live[peer.user.account]
            message = f"this user has {num_own} requests under way, and {num_free} places are "
            self.refuse(peer, submit.number, "busy", message + f"left for others (max_queue {limits.max_queue})")
        elif not self._shares.has_space(peer.user.account, size):
            num_bytes = self._shares.num_prompt_bytes
            message = f"the prompts that wait have {num_bytes} bytes ({MAX_PROMPTS} times max_message_bytes)"
            self.refuse(peer, submit.number, "busy", message)
        else:
            self._take(peer, submit, body, size)

    def refuse(self, peer: Peer, number: int, code: str, message: str, *, field: str | None = None) -> None:
        """Answer a SUBMIT with an ERROR."""
        self._statistics.refuse(code)
        retry_after_ms = self._retry_after_ms() if code == "busy" else None
        self._peers.send(peer, Error(code, message, number=number, field=field, retry_after_ms=retry_after_ms))

    def cancel(self, stream: Stream) -> None:
        """End a request for its client; a second call changes nothing."""
        if stream.phase is Phase.RUNNING:
            if not stream.cancelled:
                stream.cancelled = True
                self._decode(DecodeCancel(stream.request_id))  # END follows the engine's last output of the request
        else:
            self._end(stream, "cancelled")

    def pause(self, stream: Stream, *, resumes: bool) -> None:
        """Pause or resume a request; a second call changes nothing.

        Each call is answered, see `paused`. A request with an open prompt is not paused: it has no tokens yet, and ends
        if it waits for too long.
        """
        if stream.is_open:
            problem = "its prompt is still being written: finish it, or cancel it"
            self._tell_paused(stream, paused=False, code="invalid", problem=problem)
            return
        is_new = stream.paused == resumes and stream.phase is not Phase.DECODED
        if is_new:
            stream.paused = not resumes
        if is_new and stream.phase is Phase.RUNNING:
            self._num_paused += -1 if resumes else 1
            self._tell_engine(stream, resumes=resumes, num_asked=1)
            self.admit()
        elif stream.asked:
            stream.asked[-1] += 1
        else:
            self._tell_paused(stream, paused=stream.paused and stream.phase is not Phase.DECODED)

    def _tell_engine(self, stream: Stream, *, resumes: bool, num_asked: int) -> None:
        stream.asked.append(num_asked)
        self._decode(DecodePause(stream, resumes))

    def paused(self, event: PauseDone) -> None:
        """Tell a client that the engine has paused or resumed its request, or why it could not."""
        stream = event.stream
        count = stream.asked.pop(0)
        if event.code is not None and stream.paused and not stream.asked:
            stream.paused = False
            self._num_paused -= stream.request_id in self._inside
        for _ in range(count):
            self._tell_paused(stream, paused=event.paused, code=event.code, problem=event.problem)

    def _tell_paused(
        self, stream: Stream, *, paused: bool, code: str | None = None, problem: str | None = None
    ) -> None:
        self._peers.send(stream.peer, Paused(stream.number, paused, code, problem))

    def credit(self, stream: Stream, tokens: int) -> None:
        """Add granted tokens to a request's balance, and send what it allows."""
        stream.balance += tokens
        self._sender.feed(stream)
        if stream.waiting and not stream.peer.unsent:
            self._sender.send(stream)

    def peer_gone(self, peer: Peer) -> None:
        """Cancel the requests of a peer that is gone."""
        for stream in list(peer.streams.values()):
            self._statistics.end("gone", converts=stream.converts)
            self._leave(stream)

    def peer_unblocked(self, peer: Peer) -> None:
        """Send the outputs that waited for a peer, as its queue has space again."""
        for stream in list(peer.streams.values()):
            if peer.unsent or peer.gone:
                return
            if stream.waiting or stream.phase is Phase.DECODED:
                self._sender.send(stream)

    def prepared(self, event: Prepared) -> None:
        """Queue a request that was prepared, or refuse it for the reason that the event has."""
        stream = event.stream
        if stream.over:
            return
        self._num_preparing -= 1
        stream.job = None
        if event.code is not None:
            self._let_go(stream)
            self._fail_early(stream, event.code, event.message)
        elif event.converted:
            self._let_go(stream)
            self._take_converted(stream, event.converted)
        else:
            stream.prompt = event.prompt
            if not self._queue.num_items and self._may_enter(stream.sampling.priority):
                self._hand_over(stream)  # as `admit` would do after the queue
            else:
                stream.phase = Phase.WAITING
                self._queue.push(stream.sampling.priority, stream.peer.user.account, stream.peer, stream)
                self.admit()
                self.residence.want()

    def _take_converted(self, stream: Stream, outputs: Sequence[EngineOutput]) -> None:
        """Send a conversion's outputs as far as credit allows."""
        stream.phase = Phase.DECODED
        stream.waiting.extend(output for output in outputs if output.token_ids or output.text)
        stream.final = outputs[-1]
        if not stream.peer.unsent:
            self._sender.send(stream)

    def refused(self, event: Refused) -> None:
        """End a request that the engine refused."""
        stream = self._come_out(event.request_id)
        if stream is not None and not stream.over:
            self._fail_early(stream, event.code, event.message)
        self._came_out()

    def step(self, step: Step) -> None:
        """Take the outputs of a step; `flush` sends them."""
        any_ended = False
        for output in step.outputs:
            stream = self._inside.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                self._come_out(output.request_id)
                any_ended = True
            if stream.over:
                continue
            if output.finish_reason == "cancelled" and stream.waiting:
                stream.waiting.clear()  # a requested end does not wait for credit
            elif output.token_ids or output.text or output.reasoning or output.tool_calls or output.prompt_logprobs:
                stream.waiting.append(output)
            if output.finish_reason is not None:
                stream.phase = Phase.DECODED
                stream.final = output
                stream.metrics = step.metrics.get(output.request_id, {})
            self._dirty.append(stream)
        if any_ended:
            self._came_out()

    def _came_out(self) -> None:
        self.admit()
        if not self._inside:
            self.residence.emptied()

    def is_first(self, step: Step) -> bool:
        """Return whether a step's only output has the first tokens of a request."""
        if len(step.outputs) > 1:
            return False
        stream = self._inside.get(step.outputs[0].request_id)
        return stream is not None and not stream.first

    def flush(self) -> None:
        """Send the outputs of steps since the last flush; several outputs of a request become one message."""
        dirty = self._dirty
        for stream in dirty:
            if not stream.over and not stream.peer.unsent:
                self._sender.send(stream)
        dirty.clear()

    def end_all(self, code: str, message: str) -> None:
        """End all requests with this code."""
        for peer in self._peers:
            for stream in list(peer.streams.values()):
                self._end(stream, "error", code=code, message=message)

    def figures(self, now: float) -> dict[str, Any]:
        """Return the figures that answer STATS."""
        return {
            "model": self._info.model,
            "state": self.state,
            "num_clients": self._peers.num_greeted,
            "num_slots": self._info.max_running,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "max_queue": self._limits.max_queue,
            **self._statistics.to_dict(now),
            "step_ms": self._clock.all.to_dict(),
            "engine": dict(self.engine_figures),
        }

    def _take(self, peer: Peer, submit: Submit, body: bytes, size: int) -> None:
        self._num_ids += 1
        account = peer.user.account
        request_id, salt = f"{self._prefix}-{self._num_ids}", f"{account} {submit.cache_salt}"
        stream = Stream(peer, submit.number, request_id, submit.sampling, size, balance=submit.credit, cache_salt=salt)
        stream.session, stream.converts = submit.session, submit.result != "completion"
        peer.streams[submit.number] = stream
        self._num_preparing += 1
        self._shares.begin(account)
        self._shares.hold_bytes(account, size)
        if submit.open:
            self.open_prompts.open(stream, submit)
        else:
            self.start_deadline(stream, submit.deadline_ms)
        prepared = None
        waits = submit.sampling.has_grammar or submit.sampling.draft_texts  # these take long to prepare
        if (submit.open or 0 < len(body) <= MAX_INLINE_BYTES) and not waits:
            prepared = prepare(
                stream, submit, body, self._engine, self._codec, self._log, self._limits.default_max_tokens
            )
        if prepared is not None:
            self.prepared(prepared)
        else:
            stream.job = Prepare(stream, submit, body)
            self._text_threads.put(stream.job)
        if submit.open and not stream.over:
            self.open_prompts.begin(stream, submit, body)

    def start_deadline(self, stream: Stream, deadline_ms: int | None) -> None:
        """Start the timer of a request's deadline, if it has one."""
        if deadline_ms is not None:
            stream.deadline = self._timers.after(deadline_ms / 1000, self._late, stream)

    def hold_bytes(self, stream: Stream, num_bytes: int) -> bool:
        """Count bytes of a waiting prompt; False if there is no space for them."""
        has_space = self._shares.has_space(stream.peer.user.account, num_bytes)
        if has_space:
            self._shares.hold_bytes(stream.peer.user.account, num_bytes)
        return has_space

    def release_bytes(self, stream: Stream, num_bytes: int) -> None:
        """Stop counting bytes of a waiting prompt."""
        self._shares.release_bytes(stream.peer.user.account, num_bytes)

    def break_off(self, stream: Stream, code: str, message: str) -> None:
        """End a request that has given no output yet with an ERROR, in any phase."""
        self._leave(stream)
        self.refuse(stream.peer, stream.number, code, message)

    def end_idle(self, stream: Stream, message: str) -> None:
        """End a request whose prompt got no piece for too long."""
        self._end(stream, "error", code="deadline", message=message)

    def admit(self) -> None:
        """Submit waiting requests to the engine while it has slots, the highest priority first.

        Among equal priorities, the users with the fewest slots come first, then turns decide.
        """
        while self._queue.num_items and self._may_enter(self._queue.priority):
            self._hand_over(self._queue.pop(self._shares.inside))

    def _may_enter(self, priority: int) -> bool:
        """Return whether the engine has a slot, or would take one from a request of lower priority.

        At most as many requests as there are slots may have lost theirs.
        """
        if self.residence.holds:
            return False
        num_active, num_slots = len(self._inside) - self._num_paused, self._info.max_running
        if num_active < num_slots:
            return True
        if num_active >= 2 * num_slots:
            return False
        higher = sum(not each.paused and each.sampling.priority >= priority for each in self._inside.values())
        return higher < num_slots

    def refuse_waiting(self, message: str) -> None:
        """End every request that waits for a slot with the code `busy`."""
        while self._queue.num_items:
            stream = self._queue.pop(self._shares.inside)
            self._let_go(stream)
            self._fail_early(stream, "busy", message)

    def _hand_over(self, stream: Stream) -> None:
        if stream.opening is not None:
            for command in self.open_prompts.commands(stream, stream.opening):
                self._decode(command)
        else:
            own = (stream.request_id, stream.prompt, stream.sampling, stream.cache_salt, stream.session)
            self._decode(DecodeSubmit(*own))
        self._let_go(stream)
        stream.phase = Phase.RUNNING
        self._inside[stream.request_id] = stream
        self._shares.enter(stream.peer.user.account)
        stream.handed = time.monotonic()
        if stream.paused:
            self._num_paused += 1
            self._tell_engine(stream, resumes=False, num_asked=0)

    def _let_go(self, stream: Stream) -> None:
        """Drop a request's prompt, and stop counting its bytes."""
        self.release_bytes(stream, stream.num_bytes)
        stream.prompt = ()

    def _come_out(self, request_id: str) -> Stream | None:
        """Remove a request from those inside the engine; returns None if it was not inside."""
        stream = self._inside.pop(request_id, None)
        if stream is not None:
            self._num_paused -= stream.paused
            self._shares.come_out(stream.peer.user.account)
        return stream

    def _end_decoded(self, stream: Stream) -> None:
        """Send the END that fits the engine's last output of a request."""
        final = stream.final
        reason = None if final is None else final.finish_reason
        if final is not None and reason == "error":
            self._end(stream, "error", code=final.error_code or "internal", message=final.error)
        elif final is not None and reason == "stop":
            self._end(stream, "stop", stop_reason=final.stop_reason)
        elif reason == "length":
            self._end(stream, "length")
        elif reason == "cancelled":
            self._end(stream, "cancelled")
        else:
            self._log.error("the engine gave an unknown finish reason", extra={"reason": reason})
            self._end(stream, "error", code="internal", message="the engine ended it for an unknown reason")

    def _starved(self, stream: Stream) -> None:
        message = f"{sum(len(one.token_ids) for one in stream.waiting)} tokens waited for credit for "
        message += f"{self._limits.slow_consumer_s:g} s (slow_consumer_s)"
        self._end(stream, "error", code="slow_consumer", message=message)

    def _late(self, stream: Stream) -> None:
        self._end(stream, "cancelled", code="deadline", message="deadline_ms has passed")

    def _end(
        self,
        stream: Stream,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """Send END, drop outputs that still wait, and remove the request everywhere."""
        if stream.over:
            return
        end = stream.end_message(reason, stop_reason=stop_reason, code=code, message=message)
        self._statistics.end(code or reason, converts=stream.converts)
        if not stream.converts:
            self._statistics.duration.record(time.monotonic() - stream.arrived)
        self._leave(stream)
        self._peers.send(stream.peer, end)

    def _fail_early(self, stream: Stream, code: str, message: str) -> None:
        """End a request that has given no output yet, with ERROR in place of END."""
        stream.phase = Phase.DECODED  # nothing is left to cancel
        self._leave(stream)
        self.refuse(stream.peer, stream.number, code, message)

    def _leave(self, stream: Stream) -> None:
        """Remove a request from queue and engine; its slot counts as taken until the engine reports the end."""
        if stream.phase is Phase.PREPARING:
            self._num_preparing -= 1
            self._let_go(stream)
            if stream.job is not None:
                stream.job.drop()
        elif stream.phase is Phase.WAITING:
            self._queue.remove(stream.sampling.priority, stream.peer.user.account, stream.peer, stream)
            self._let_go(stream)
        elif stream.phase is Phase.RUNNING and not stream.cancelled:
            self._decode(DecodeCancel(stream.request_id))
        stream.over = True
        stream.waiting.clear()
        stream.prompt = ()
        if stream.opening is not None:
            self.open_prompts.leave(stream, stream.opening)
        self._timers.cancel(stream.deadline)
        self._sender.feed(stream)
        del stream.peer.streams[stream.number]
        self._shares.end(stream.peer.user.account)

    def _retry_after_ms(self) -> int:
        """Estimate when a slot is free for one more request, from the queue and the median time of a request."""
        usual_s = self._statistics.duration.percentile(0.5)
        turns = (self.num_waiting + 1) / self._info.max_running
        return min(MAX_RETRY_MS, max(MIN_RETRY_MS, int(1000 * (usual_s * turns + self.residence.retry_s))))
