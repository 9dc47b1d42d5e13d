# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a test lie in memory: strides of each storage, and those of a view."""

from __future__ import annotations

STORAGES = ("contiguous", "transposed", "padded", "packed", "expanded", "odd")


def geometry(view):
    """Item size, shape and strides in elements."""
    if hasattr(view, "strides"):
        itemsize, strides = view.itemsize, [n // view.itemsize for n in view.strides]
    else:
        itemsize, strides = view.element_size(), view.stride()
    shape = tuple(view.shape)  # strides of axes of one element may be anything
    return itemsize, shape, [n if m > 1 else 0 for n, m in zip(strides, shape, strict=True)]


def element_strides(shape, storage, unit):
    """Strides in elements, and the elements that they span; `unit` is the alignment of a row in
    elements.
    """
    ndim = len(shape)
    order = list(range(ndim))  # slowest first
    row = shape[-1] if ndim else 1
    if storage == "transposed" and ndim >= 3:
        order[-3], order[-2] = order[-2], order[-3]
    elif storage == "reversed":
        order.reverse()
    elif storage.startswith("columns"):  # the sequence is the contiguous axis
        seq = ndim - 2 if storage == "columns_bhsd" else ndim - 3
        order.append(order.pop(seq))
    strides, step = [0] * ndim, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
        if axis == ndim - 1 and storage == "padded":
            step = -(-row // unit) * unit + unit  # unused elements behind every row
        if axis == order[-1] and storage.startswith("columns"):
            step = -(-step // unit) * unit
        if axis == ndim - 2 and storage == "packed":
            step += 2 * shape[axis] * row  # as if q, k and v were interleaved
    if storage == "gapped":  # as if another array lay between the slices of the first axis
        strides[0] *= 2
        step = strides[0] * shape[0]
    if storage == "expanded" and ndim >= 3:
        strides[-2] = 0  # the heads of bshd
    if storage == "expanded_bhsd" and ndim >= 3:
        strides[-3] = 0
    if storage == "odd":  # the stride of an axis of one element means nothing
        strides = [
            s if n != 1 or i == ndim - 1 else 99990001
            for i, (n, s) in enumerate(zip(shape, strides, strict=True))
        ]
    return strides, step
