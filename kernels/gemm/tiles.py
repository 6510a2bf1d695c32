"""This module describes the tiles of dense weights for decode GEMMs: 16 rows by 64 columns, one step after another.

A step has codes, and after them words of scales, one for each group of rows i and i + 8: two bf16 scales, or a float32
scale of the one and a word of the other. If there are zero points, words of two bf16 numbers follow, 128 and the zero
point less than zero. If blocks of few columns have scales, words of those follow. A lane has its codes in pieces of 16
bytes, 512 bytes from one piece to the next.
"""

from dataclasses import dataclass

__all__ = ["BF16_TILES", "CODED_ROWS_TILES", "WORD_BYTES", "TileFormat"]

ROW_PAIRS = 8
WORD_BYTES = 4 * ROW_PAIRS  # a word after the codes, of all pairs of rows
TILE_NUMBERS = 16 * 64


@dataclass(frozen=True)
class TileFormat:
    """One way to hold a step.

    name        of the codes, as `CodedFormat.codes` has it
    code_bytes  of a step
    row_scales  rows have a scale each, float32, after all tiles, which the epilogue applies
    groups      of columns in a step that have scales of their own: 0, 1 or 2
    wide        these scales are float32, else bf16
    zeros       groups have zero points
    block_words  of scales that codes are multiplied by before anything is added up
    by_codes     codes are multiplied by codes of rows, as they are: a step is 128 columns, two of the packed steps
    """

    name: str
    code_bytes: int
    row_scales: bool = False
    groups: int = 0
    wide: bool = False
    zeros: bool = False
    block_words: int = 0
    by_codes: bool = False

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return self.code_bytes * 8 // (TILE_NUMBERS << self.by_codes)

    @property
    def scale_words(self) -> int:
        """Words of scales that a lane reads for a group."""
        return 2 if self.wide else 1

    @property
    def words(self) -> int:
        """Words after a step's codes that a lane reads."""
        return self.block_words + self.groups * (self.scale_words + self.zeros)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step in memory, where four lanes have a word in common."""
        return self.code_bytes + self.words * WORD_BYTES

    @property
    def shared_bytes(self) -> int:
        """Bytes of a step in shared memory, with a place for each lane's own words, or those of four steps in one."""
        return self.code_bytes + self.words * 128

    @property
    def label(self) -> str:
        """The name in kernels' names and tuning tables: all that tells kernels apart."""
        scales = (
            "" if not self.groups else f"_{self.groups}{'wide' if self.wide else ''}{'zeros' if self.zeros else ''}"
        )
        return f"{self.name}{scales}{'_by_codes' if self.by_codes else ''}"


BF16_TILES = TileFormat("bf16", 2048)
CODED_ROWS_TILES = TileFormat("fp8", 2048, row_scales=True, by_codes=True)  # FP8 by row, two steps as one
