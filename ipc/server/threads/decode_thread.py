"""The decode thread owns the engine: it makes it, steps it while there is work, and never waits for a socket."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lowlat.errors import CapacityError, ConfigError, DeviceError, RequestError
from lowlat.ipc.engine import Engine, EngineOutput
from lowlat.ipc.server.logs import describe
from lowlat.ipc.server.threads.events import (
    Command,
    DecodeCancel,
    DecodeFinish,
    DecodeGrow,
    DecodeOpen,
    DecodePause,
    DecodeResidence,
    DecodeStop,
    DecodeSubmit,
    EngineFigures,
    Failed,
    PauseDone,
    Post,
    Refused,
    ResidenceDone,
    Step,
)
from lowlat.ipc.server.threads.watchdog import StepClock
from lowlat.ipc.wake import Inbox

__all__ = ["DecodeThread"]

FIGURES_EVERY_S = 1.0
FIGURES_AT_REST_S = 0.05


class DecodeThread(threading.Thread):
    """Makes the engine, obeys commands between steps, and posts the outputs of steps.

    ready    set when the engine was made, or `error` says why it was not
    engine   other threads read it once ready, for its `info` and `validate`
    """

    def __init__(self, make_engine: Callable[[], Engine], clock: StepClock, log: logging.Logger) -> None:
        super().__init__(name="lowlat-decode", daemon=True)
        self._make_engine = make_engine
        self._clock = clock
        self._log = log
        self._commands: Inbox[Command] = Inbox()
        self._num_running = 0
        self._joined = False
        self._stopping = False
        self.post: Post  # both set before the first command comes
        self.offer: Post  # handles the event in this thread if the I/O thread sleeps, else posts it
        self.engine: Engine
        self.error: BaseException | None = None
        self.ready = threading.Event()

    def put(self, command: Command) -> None:
        """Queue a command, which is obeyed before the next step."""
        self._commands.put(command)

    def close(self) -> None:
        """Close the inbox, once the thread has ended."""
        self._commands.close()

    def run(self) -> None:
        try:
            self.engine = self._make_engine()
        except BaseException as error:  # raised by the thread that waits for the engine
            self.error = error
            return
        finally:
            self.ready.set()
        try:
            self._decode()
        except DeviceError as error:
            self._fail("device", "the device failed", error)
        except BaseException as error:  # no thread decodes after any exception
            self._fail("internal", "decoding failed", error)
        finally:
            self._close()

    def _decode(self) -> None:
        engine, commands, clock = self.engine, self._commands, self._clock
        next_figures = 0.0
        engine.watch(commands.rouse)
        self._post_figures()
        while not self._stopping:
            if engine.busy:
                clock.begin()
            else:
                clock.rest()
                resting = self._rest()
                clock.begin()
                if resting is not None:
                    self._obey(resting)
            while (command := commands.take()) is not None:
                self._obey(command)
            if self._stopping or not engine.busy:
                continue
            clock.step(self._num_running, self._joined)
            self._joined = False
            outputs = engine.step()
            ended = time.monotonic()
            if outputs:
                self._publish(outputs)
            clock.end(ended)
            if clock.completed >= next_figures:
                self._post_figures()
                next_figures = clock.completed + FIGURES_EVERY_S

    def _rest(self) -> Command | None:
        """Wait for the next command, and return it; None if the engine itself has something to do.

        A moment after the last step, when its outputs are on their way, post the figures.
        """
        command = self._commands.wait(FIGURES_AT_REST_S)
        if command is None and not self.engine.busy:  # otherwise a step comes first
            self._post_figures()
        while command is None and not self.engine.busy:
            until = self.engine.deadline
            command = self._commands.wait(None if until is None else max(0.0, until - time.monotonic()))
        return command

    def _publish(self, outputs: Sequence[EngineOutput]) -> None:
        metrics = {}
        for output in outputs:
            if output.finish_reason is not None:
                metrics[output.request_id] = self.engine.metrics(output.request_id)
                self._num_running -= 1
        self.offer(Step(outputs, metrics))

    def _obey(self, command: Command) -> None:
        if isinstance(command, DecodeSubmit | DecodeOpen):
            self._submit(command)
        elif isinstance(command, DecodeGrow | DecodeFinish):
            self._grow(command)
        elif isinstance(command, DecodeCancel):
            try:
                self.engine.cancel(command.request_id)
            except RequestError:
                return  # it ended meanwhile: its last output is on the way
        elif isinstance(command, DecodePause):
            self._pause(command)
        elif isinstance(command, DecodeResidence):
            self._reside(command)
        elif isinstance(command, DecodeStop):
            self._stopping = True

    def _reside(self, command: DecodeResidence) -> None:
        self._clock.rest()  # copying weights is no step, so the watchdog must not time it
        problem = ""
        try:
            if command.asleep:
                self.engine.sleep()
            else:
                self.engine.wake()
        except (CapacityError, ConfigError) as error:
            problem = str(error)
        self.post(ResidenceDone(command.asleep, problem))
        self._post_figures()
        self._clock.begin()

    def _pause(self, command: DecodePause) -> None:
        stream, paused, code, problem = command.stream, False, None, None
        try:
            if command.resumes:
                self.engine.resume(stream.request_id)
            else:
                paused = self.engine.pause(stream.request_id)
        except RequestError:
            paused = False  # it has ended, or was resumed without being paused
        except CapacityError as error:
            code, problem = "busy", str(error)
        self.post(PauseDone(stream, paused, code, problem))

    def _grow(self, command: DecodeGrow | DecodeFinish) -> None:
        name = command.request_id
        try:
            if isinstance(command, DecodeFinish):
                self.engine.finish_prompt(name, command.token_ids, speculative=command.speculative)
                self._joined = True
            else:
                self.engine.grow_prompt(name, command.token_ids)
        except RequestError as error:
            try:
                self.engine.cancel(name)
            except RequestError:
                return  # it ended meanwhile: its last output is on the way
            self.post(Refused(name, "invalid", str(error)))

    def _submit(self, command: DecodeSubmit | DecodeOpen) -> None:
        shared = (command.sampling, command.cache_salt, command.session)
        try:
            if isinstance(command, DecodeOpen):
                self.engine.open_prompt(command.request_id, *shared, command.max_prompt_tokens)
            else:
                self.engine.submit(command.request_id, command.prompt, *shared)
        except RequestError as error:
            self.post(Refused(command.request_id, "invalid", str(error)))
        except CapacityError as error:
            self.post(Refused(command.request_id, "busy", str(error)))
        else:
            self._num_running += 1
            self._joined = True

    def _post_figures(self) -> None:
        self.post(EngineFigures(self.engine.stats()))

    def _fail(self, code: str, what: str, error: BaseException) -> None:
        # The text of a DeviceError is lowlat's own; other texts may contain a prompt.
        words = str(error) if isinstance(error, DeviceError) else describe(error)
        self.post(Failed(code, f"{what}; the server ends"))
        self._log.critical("%s: %s", what, words)

    def _close(self) -> None:
        self._clock.rest()
        try:
            self.engine.close()
        except Exception as error:
            self._log.error("closing the engine failed: %s", describe(error))
