"""What the machine would allow: the time that a workload's reading and multiplying takes at the measured rates.

A prompt's part is the larger of its two times, `Limits.prompts`:

- reading: weights, once for every step that the prompts need (tokens / max_num_batched_tokens, rounded up);
- multiplying: the matrices for each token, but those that only rows whose next token is drawn go through once for each prompt.

So is the answers', their first tokens left out, `Limits.answers`:

- reading: weights, once a step, and for each token the keys and values of all before it and its own. There are as many steps as
  the longest answer needs, or as all answers need where max_num_seqs run at once, whichever are more;
- multiplying: all matrices for each token.

W1's limit is then its tokens over prompts + answers. Attention's own products, activations and samplers count nothing, a sliding
window counts as if it were not there: the limit is reached by nobody, and percents of different machines can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.backend import Ceilings
from ..model.program import Linear, Program, Select
from .workloads import Line, Phase


def multiply_adds(program: Program) -> tuple[int, int]:
    """Of the matrices that every token goes through, and of those that only tokens do whose next one is drawn."""
    counts, last = [0, 0], 0
    for op in program.ops:
        if isinstance(op, Select):
            last = 1
        elif isinstance(op, Linear):
            counts[last] += sum(rows * columns for rows, columns in (program.parameters[name] for name in op.weights))
    return counts[0], counts[1]


@dataclass(frozen=True)
class Limits:
    """Attributes:
    weight_bytes, kv_bytes_per_token: of the session.
    every, drawn: as `multiply_adds` tells.
    """

    ceilings: Ceilings
    weight_bytes: int
    kv_bytes_per_token: int
    every: int
    drawn: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, engine, program: Program, ceilings: Ceilings) -> Limits:
        session, plan = engine.session, engine.plan
        sizes = session.weight_bytes, session.kv_bytes_per_token
        return cls(ceilings, *sizes, *multiply_adds(program), plan.max_num_seqs, plan.max_num_batched_tokens)

    def _seconds(self, read: float, multiplied: float) -> float:
        return max(read / self.ceilings.bytes_per_s, multiplied / self.ceilings.multiply_adds_per_s)

    def prompts(self, phase: Phase) -> float:
        """Seconds until every request of a phase has its first token."""
        tokens = sum(len(ids) for ids, _ in phase)
        steps = -(-tokens // self.max_num_batched_tokens)
        return self._seconds(steps * self.weight_bytes, tokens * self.every + len(phase) * self.drawn)

    def answers(self, phase: Phase) -> float:
        """Seconds for the tokens after the first."""
        later = [new - 1 for _, new in phase]
        steps = max(*later, -(-sum(later) // self.max_num_seqs))
        keys = sum(n * len(ids) + n * (n + 1) / 2 for n, (ids, _) in zip(later, phase))
        return self._seconds(steps * self.weight_bytes + keys * self.kv_bytes_per_token, sum(later) * (self.every + self.drawn))

    def figure(self, line: Line, phases: list[Phase]) -> float | None:
        """What a line would be at the limit, in its unit; None of shared prompts, whose work is what the cache leaves of it."""
        if line.group == "shared":
            return None
        phase = phases[0]
        if line.key == "decode":
            return line.tokens / self.answers(phase)
        if line.key == "first_token":
            return 1000 * self.prompts(phase)
        return (line.tokens or sum(new for _, new in phase)) / (self.prompts(phase) + self.answers(phase))


def percent(line: Line, figure: float, limit: float) -> float:
    """How much of what the machine allows a figure is."""
    return 100 * (figure / limit if line.more_is_better else limit / figure)
