"""A model whose windows hold the whole context runs with full attention, with the tokens of one that has them."""

from pathlib import Path

from tiny_models import make_target, transformers_logits

from lowlat.engine.runtime import Runtime
from lowlat.options.request import SamplingParams

WINDOW = 24


def test_up_to_the_window_nothing_differs(tmp_path: Path) -> None:
    model = make_target(tmp_path, "mistral", sliding_window=WINDOW)
    prompt = [5 + 3 * place for place in range(16)]
    with Runtime.load(tmp_path, max_batch=1, max_context=WINDOW) as runtime:
        assert set(runtime.geometry.config.windows) == {None}
        runtime.submit(prompt, SamplingParams(max_tokens=WINDOW - len(prompt), ignore_eos=True))
        made = [token for _ in range(40) if runtime.busy for output in runtime.step() for token in output.token_ids]
    assert len(made) == WINDOW - len(prompt)
    expected = transformers_logits(model, prompt + made[:-1])[len(prompt) - 1 :].argmax(-1)
    assert made == expected.tolist()
    with Runtime.load(tmp_path, max_batch=1, max_context=WINDOW + 1) as runtime:
        assert runtime.geometry.config.windows == (WINDOW,) * model.config.num_hidden_layers
