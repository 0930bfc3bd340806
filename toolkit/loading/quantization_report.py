"""The report of `tk.quantize`: one row per matrix, totals, and the similarity of the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TypeGuard

from toolkit.core.units import bytes_text, plural

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Matrix:
    """One matrix or table, by its logical name, whether it is fused or not.

    `was` and `was_bits` are the dtype or scheme before, and its bits per weight. `scheme` is the new scheme, or None if the
    matrix was not quantized, for the reason `why`. `snr_db` is the signal-to-noise ratio in dB: 10 log10 of the power of the
    original weights over the power of the error. It is infinite without error. Without values (sizes only), it and
    `max_abs_error` are NaN.
    """

    name: str
    shape: tuple[int, ...]
    was: str
    was_bits: float
    scheme: str | None
    why: str
    snr_db: float | None = None
    max_abs_error: float | None = None
    now_bits: float | None = None

    @property
    def weights(self) -> int:
        """The number of weights."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight now, including scales and offsets."""
        return self.was_bits if self.now_bits is None else self.now_bits


@dataclass(frozen=True)
class Quantization:
    """The report of `tk.quantize`.

    `cosine` and `lowest_cosine` compare the logits of both models: mean and minimum over the positions of the prompt `ids`.
    """

    scheme: str
    method: str
    matrices: tuple[Matrix, ...]
    cosine: float
    lowest_cosine: float
    ids: tuple[int, ...]

    @property
    def quantized(self) -> tuple[Matrix, ...]:
        """The matrices that were quantized."""
        return tuple(matrix for matrix in self.matrices if matrix.scheme)

    quantised = quantized  # the former name

    @property
    def left(self) -> tuple[Matrix, ...]:
        """The matrices that were not quantized; `why` is the reason."""
        return tuple(matrix for matrix in self.matrices if not matrix.scheme)

    @property
    def bytes_before(self) -> int:
        """Bytes of all matrices and tables before."""
        return round(sum(m.weights * m.was_bits for m in self.matrices) / 8)

    @property
    def bytes_after(self) -> int:
        """Bytes of all matrices and tables after, including those not quantized."""
        return round(sum(m.weights * m.bits_per_weight for m in self.matrices) / 8)

    @property
    def bits_per_weight(self) -> float:
        """Average over all matrices and tables."""
        return 8 * self.bytes_after / sum(m.weights for m in self.matrices)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per matrix: name, shape, weights, was, scheme, bits_per_weight, snr_db, max_abs_error, why."""
        import pandas as pd

        columns = ("name", "shape", "weights", "was", "scheme", "bits_per_weight", "snr_db", "max_abs_error", "why")
        return pd.DataFrame([[getattr(m, column) for column in columns] for m in self.matrices], columns=list(columns))

    def __repr__(self) -> str:
        return "\n".join(self._summary())

    def _repr_html_(self) -> str:
        summary = "<br>".join(map(escape, self._summary()))
        head = "".join(f"<th>{name}</th>" for name in ("matrix", "shape", "was", "now", "bits", "SNR", "largest error", ""))
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(m))}</tr>" for m in self.matrices)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div>{summary}</div><details><summary>{len(self.matrices)} matrices</summary>{table}</details>"

    def _summary(self) -> list[str]:
        by_scheme: dict[str, list[Matrix]] = {}
        for matrix in self.quantized:
            by_scheme.setdefault(str(matrix.scheme), []).append(matrix)
        sizes = f"{bytes_text(self.bytes_before)} of matrices became {bytes_text(self.bytes_after)}"
        lines = [f"{self.scheme} ({self.method}): {sizes}, {self.bits_per_weight:.3g} bits per weight"]
        for name, matrices in by_scheme.items():
            ratios = [m.snr_db for m in matrices if _is_known(m.snr_db)]
            many = plural(len(matrices), "matrix", "matrices")
            snr = f"SNR {min(ratios):.1f} to {max(ratios):.1f} dB" if ratios else "SNR unknown"
            lines.append(f"  {name}: {many}, {snr}")
        reasons: dict[str, list[str]] = {}
        for matrix in self.left:
            reasons.setdefault(matrix.why, []).append(matrix.name)
        for why, names in reasons.items():
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            lines.append(f"  not quantized, {why}: {', '.join(names[:3])}{more}")
        if any(_is_known(matrix.snr_db) for matrix in self.quantized):
            logits = f"cosine {self.cosine:.5f}, lowest {self.lowest_cosine:.5f}"
            return [*lines, f"  logits on {plural(len(self.ids), 'token')}: {logits}"]
        return [*lines, "  the weights have no values, so the errors are unknown"]


Quantisation = Quantization  # the former name


def _is_known(error: float | None) -> TypeGuard[float]:
    """Return whether an error was measured, on values: it is NaN without values, and None if nothing was quantized."""
    return error is not None and not math.isnan(error)


def _cells(matrix: Matrix) -> tuple[str, ...]:
    shape = " x ".join(f"{size:,}" for size in matrix.shape)
    snr = f"{matrix.snr_db:.1f} dB" if _is_known(matrix.snr_db) else ""
    error = f"{matrix.max_abs_error:.3g}" if _is_known(matrix.max_abs_error) else ""
    now = matrix.scheme or matrix.was
    return matrix.name, shape, matrix.was, now, f"{matrix.bits_per_weight:.4g}", snr, error, matrix.why
