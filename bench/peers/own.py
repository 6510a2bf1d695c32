"""lowlat itself, measured as `lowlat bench run` measures it."""

from pathlib import Path

from bench.lib.subjects import open_subject
from bench.peers.engine import Found, Job, Mark, Measured, without_draft_model
from bench.peers.stage import Stage
from lowlat import __version__

__all__ = ["Own"]


class Own:
    """The engine of this repository; its executor is what `auto` chooses."""

    name = "lowlat"

    def available(self) -> Found:
        """This version of lowlat, which is always there."""
        return Found(__version__)

    def refusal(self, job: Job) -> str:
        """Why a case cannot be measured: drafts without a draft model."""
        return without_draft_model(job)

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Measure a case by `CaseRun`. Raises LowlatError where it fails."""
        with open_subject(
            {"device": job.device, "dtype": job.dtype},
            geometry=job.geometry,
            model=None if job.geometry else Path(job.directory),
            draft_model=None if job.draft_directory is None or not job.depth else Path(job.draft_directory),
            accept_length=job.imposed_length,
            drafts=job.depth > 0,
            prompts=None if job.prompts is None else Path(job.prompts),
        ) as subject:
            stage = Stage(subject, job.steps, job.warm_up, job.repeats)
            samples = stage.run(job.case, [job.case]).samples
            mark()
            stage.close()
            return Measured(list(samples), {"executor": stage.choice.executor, "dtype": subject.config.dtype})
