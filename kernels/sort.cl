/* Stable sort of rows [M, n], with the place that each element came from: a merge sort in global memory.

   sort_blocks   an item per element (i, row): its rank among the BLOCK elements around it, by comparing with all
   sort_merge    an item per element (i, row): its place when its run of `width` is merged with the neighbouring one,
                 which is its own place plus those of the other run that go before it (binary search)

   Launched once, then for width = BLOCK, 2 BLOCK, ... < n, from one pair of arrays to another. Only the first `keep`
   elements of each run are kept, which is all that a top k needs (keep = n sorts everything).
   Equal elements keep their order; NaN counts as the largest. Assumed: dense tensors; width a power of two.

   T            element type: float, int or long
   IS_FLOAT     1 if T is float
   DESCENDING   1: the largest first
   BLOCK        a power of two */

#ifndef T
#define T float
#define IS_FLOAT 1
#endif
#ifndef IS_FLOAT
#define IS_FLOAT 0
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#ifndef BLOCK
#define BLOCK 128
#endif

static inline int less(T a, T b)
{
#if IS_FLOAT
    return (a < b) | (isnan(b) & !isnan(a));
#else
    return a < b;
#endif
}

#if DESCENDING
#define BEFORE(a, b) less(b, a)
#else
#define BEFORE(a, b) less(a, b)
#endif

__kernel void sort_blocks(__global const T *x, int x_at, __global T *keys, int keys_at, __global int *order,
                          int order_at, int length, int rows, int keep)
{
    const int i = (int)get_global_id(0), row = (int)get_global_id(1);
    if (i >= length || row >= rows)
        return;
    const int start = row * length, block = i / BLOCK * BLOCK, end = min(length, block + BLOCK);
    const T mine = x[x_at + start + i];
    int rank = 0;
#pragma unroll 1
    for (int j = block; j < end; ++j) {
        const T other = x[x_at + start + j];
        rank += BEFORE(other, mine) | ((j < i) & !BEFORE(mine, other));
    }
    if (rank < keep) {
        keys[keys_at + start + block + rank] = mine;
        order[order_at + start + block + rank] = i;
    }
}

__kernel void sort_merge(__global const T *keys, int keys_at, __global const int *order, int order_at,
                         __global T *out_keys, int out_keys_at, __global int *out_order, int out_order_at, int length,
                         int rows, int keep, int width)
{
    const int i = (int)get_global_id(0), row = (int)get_global_id(1);
    if (i >= length || row >= rows)
        return;
    const int run = i & ~(width - 1), other = run ^ width, inside = i - run, kept = min(width, keep);
    if (inside >= kept)
        return;
    const int start = row * length, is_left = run < other;
    const T mine = keys[keys_at + start + i];
    __global const T *others = keys + keys_at + start + other;
    int low = 0, high = min(kept, max(length - other, 0));
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high) / 2;
        const T theirs = others[middle];
        if (is_left ? BEFORE(theirs, mine) : !BEFORE(mine, theirs))
            low = middle + 1;
        else
            high = middle;
    }
    const int place = inside + low;
    if (place < keep) {
        const int to = start + min(run, other) + place;
        out_keys[out_keys_at + to] = mine;
        out_order[out_order_at + to] = order[order_at + start + i];
    }
}
