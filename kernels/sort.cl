/* Stable sort of rows [M, n], with the place that each element came from: a merge sort in global memory.

   sort_blocks   an item per element (i, block, row): its rank among the BLOCK elements of its block, by comparing with all
   sort_merge    an item per element (i, run, row): its place when its run is merged with the neighbouring one, which is
                 its own place plus the number of those in the other run that go before it (binary search)

   A run has `kept` elements, the last run of a row `last`; runs follow one another without gaps. sort_blocks makes runs
   of min(BLOCK, keep), each sort_merge half as many, of min(2 kept, keep): only the first `keep` of each run are ever
   needed for the first `keep` of all (keep = n sorts everything).
   Equal elements keep their order; NaN counts as the largest. Assumed: dense tensors.

   T            element type: float, int or long
   IS_FLOAT     1 if T is float
   DESCENDING   1: the largest first
   BLOCK        elements of a block */

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

/* x [M, n] -> keys, order [M, stride] in runs of `keep` at most. */
__kernel void sort_blocks(__global const T *x, int x_at, __global T *keys, int keys_at, __global int *order,
                          int order_at, int length, int blocks, int rows, int kept, int stride)
{
    const int inside = (int)get_global_id(0), block = (int)get_global_id(1), row = (int)get_global_id(2);
    const int start = block * BLOCK, i = start + inside, end = min(length, start + BLOCK);
    if (inside >= BLOCK || i >= length || block >= blocks || row >= rows)
        return;
    __global const T *from = x + x_at + row * length;
    const T mine = from[i];
    int rank = 0;
#pragma unroll 1
    for (int j = start; j < end; ++j) {
        const T other = from[j];
        rank += BEFORE(other, mine) | ((j < i) & !BEFORE(mine, other));
    }
    if (rank < kept) {
        const int to = row * stride + block * kept + rank;
        keys[keys_at + to] = mine;
        order[order_at + to] = i;
    }
}

__kernel void sort_merge(__global const T *keys, int keys_at, __global const int *order, int order_at,
                         __global T *out_keys, int out_keys_at, __global int *out_order, int out_order_at, int runs,
                         int rows, int kept, int last, int stride, int out_kept, int out_stride)
{
    const int inside = (int)get_global_id(0), run = (int)get_global_id(1), row = (int)get_global_id(2);
    if (run >= runs || row >= rows || inside >= (run == runs - 1 ? last : kept))
        return;
    const int other = run ^ 1, is_left = run < other, i = row * stride + run * kept + inside;
    const T mine = keys[keys_at + i];
    __global const T *others = keys + keys_at + row * stride + other * kept;
    int low = 0, high = other >= runs ? 0 : (other == runs - 1 ? last : kept);
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
    if (place < out_kept) {
        const int to = row * out_stride + (run / 2) * out_kept + place;
        out_keys[out_keys_at + to] = mine;
        out_order[out_order_at + to] = order[order_at + i];
    }
}
