/* Indexing: elements and rows picked by a tensor of indices, and put or added where indices say.

       gather         out[a, i, b] = x[a, index[a, i, b], b]
       take           out[a, i, b] = x[a, rows[i], b]
       scatter        out = x with src[a, i, b] put, or added, at [a, index[a, i, b], b]
       put            out = x with values[a, i, b] put, or added, at [a, rows[i], b]

       x [A, R, B], index and src [A, I, B], rows [I], values [A, I, B]; all dense

   No kernel adds to what another item may add to. `put` has an item for each element of the result (one write each):
   it finds what belongs there in the sorted rows, where those that are equal are neighbours in the order in which they
   came. The last one is the one that stays, and sums are made in that order.

   gather          an item per element of out (b, i, a)
   take            an item per VW elements of out (b, i, a), or more: items along b are as many as were launched
   row_numbers     rows[i] of one of several index tensors: rows = rows * size + index
   scatter_few     an item per element of out (b, r, a); for few I
   scatter_lines   an item per line (b, a) of index, out holding x already; for processors: it reads what it wrote
   scatter_places  an item per index (b, i, a): its place in out, as a row number for put (A = B = 1)
   segment_starts  an item per row of x: where its indices begin in the sorted rows; starts [R + 1]
   chunk_sums      the same for (b, chunk, a): the sum of values in a chunk of the sorted rows, as far as they
                   continue the row of the chunk before; chunks [A, ceil(I / CHUNK), B]
   put             the same for out (b, r, a)

   An index beyond its dimension is reported as a fault, and taken as 0.

   T      element type: float, int or long
   INDEX  type of the rows of take: long (then checked) or int (row_numbers checked them)
   WRAPS  1: negative indices count from the end
   ADD    1: add, else put
   HAS_X  1: put into x, else into zeros
   BYTE   1: sums are of bytes
   VW     elements of one item */

#ifndef T
#define T float
#endif
#ifndef INDEX
#define INDEX long
#endif
#ifndef CHECKED
#define CHECKED 1
#endif
#ifndef WRAPS
#define WRAPS 0
#endif
#ifndef ADD
#define ADD 1
#endif
#ifndef HAS_X
#define HAS_X 1
#endif
#ifndef BYTE
#define BYTE 0
#endif
#ifndef VW
#define VW 1
#endif
#define CHUNK 64

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
typedef T elements;
#define LOAD(p) (*(p))
#define STORE(v, p) (*(p) = (v))
#else
typedef JOIN(T, VW) elements;
#define LOAD(p) JOIN(vload, VW)(0, p)
#define STORE(v, p) JOIN(vstore, VW)(v, 0, p)
#endif

#if BYTE
#define FITTED(x) ((x) & 255)
#else
#define FITTED(x) (x)
#endif

/* The index as an int within 0..size-1. */
static inline int checked(long index, int size, __global int *fault, int node)
{
#if WRAPS
    const long place = index < 0 ? index + size : index;
#else
    const long place = index;
#endif
    if (place < 0 || place >= size) {
        fault[0] = node + 1;
        fault[1] = (int)clamp(index, (long)INT_MIN, (long)INT_MAX);
        return 0;
    }
    return (int)place;
}

__kernel void gather(__global const T *x, int x_at, __global const long *index, int index_at, __global T *out,
                     int out_at, int inner, int count, int outer, int size, __global int *fault, int fault_at, int node)
{
    const int b = (int)get_global_id(0), i = (int)get_global_id(1), a = (int)get_global_id(2);
    if (b >= inner || i >= count || a >= outer)
        return;
    const int place = (a * count + i) * inner + b;
    const int r = checked(index[index_at + place], size, fault + fault_at, node);
    out[out_at + place] = size > 0 ? x[x_at + (a * size + r) * inner + b] : (T)0;
}

__kernel void take(__global const T *x, int x_at, __global const INDEX *rows, int rows_at, __global T *out, int out_at,
                   int inner, int count, int outer, int size, __global int *fault, int fault_at, int node)
{
    const int i = (int)get_global_id(1), a = (int)get_global_id(2);
    if (i >= count || a >= outer)
        return;
#if CHECKED
    const int r = checked(rows[rows_at + i], size, fault + fault_at, node);
#else
    const int r = rows[rows_at + i];
#endif
#pragma unroll 1
    for (int b = (int)get_global_id(0) * VW; b < inner; b += (int)get_global_size(0) * VW) {
        elements value = (elements)(0);
        if (size > 0)
            value = LOAD(x + x_at + (a * size + r) * inner + b);
        STORE(value, out + out_at + (a * count + i) * inner + b);
    }
}

__kernel void row_numbers(__global const long *index, int index_at, __global const int *before, int before_at,
                          __global int *rows, int rows_at, int count, int size, int first, __global int *fault,
                          int fault_at, int node)
{
    const int i = (int)get_global_id(0);
    if (i >= count)
        return;
    const int own = checked(index[index_at + i], size, fault + fault_at, node);
    rows[rows_at + i] = first ? own : before[before_at + i] * size + own;
}

__kernel void scatter_few(__global const T *x, int x_at, __global const long *index, int index_at,
                          __global const T *src, int src_at, __global T *out, int out_at, int inner, int size,
                          int outer, int count, __global int *fault, int fault_at, int node)
{
    const int b = (int)get_global_id(0), r = (int)get_global_id(1), a = (int)get_global_id(2);
    if (b >= inner || r >= size || a >= outer)
        return;
    const int place = (a * size + r) * inner + b;
    T value = x[x_at + place];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const int from = (a * count + i) * inner + b;
        if (checked(index[index_at + from], size, fault + fault_at, node) == r)
#if ADD
            value = FITTED(value + src[src_at + from]);
#else
            value = src[src_at + from];
#endif
    }
    out[out_at + place] = value;
}

__kernel void scatter_lines(__global const long *index, int index_at, __global const T *src, int src_at,
                            __global T *out, int out_at, int inner, int outer, int size, int count,
                            __global int *fault, int fault_at, int node)
{
    const int b = (int)get_global_id(0), a = (int)get_global_id(1);
    if (b >= inner || a >= outer)
        return;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const int from = (a * count + i) * inner + b;
        const int r = checked(index[index_at + from], size, fault + fault_at, node);
        __global T *to = out + out_at + (a * size + r) * inner + b;
#if ADD
        *to = FITTED(*to + src[src_at + from]);
#else
        *to = src[src_at + from];
#endif
    }
}

__kernel void scatter_places(__global const long *index, int index_at, __global int *places, int places_at, int inner,
                             int count, int outer, int size, __global int *fault, int fault_at, int node)
{
    const int b = (int)get_global_id(0), i = (int)get_global_id(1), a = (int)get_global_id(2);
    if (b >= inner || i >= count || a >= outer)
        return;
    const int from = (a * count + i) * inner + b;
    const int r = checked(index[index_at + from], size, fault + fault_at, node);
    places[places_at + from] = (a * size + r) * inner + b;
}

__kernel void segment_starts(__global const int *sorted, int sorted_at, __global int *starts, int starts_at, int count,
                             int size)
{
    const int r = (int)get_global_id(0);
    if (r > size)
        return;
    int low = 0, high = count;
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high) / 2;
        if (sorted[sorted_at + middle] < r)
            low = middle + 1;
        else
            high = middle;
    }
    starts[starts_at + r] = low;
}

__kernel void chunk_sums(__global const T *values, int values_at, __global const int *sorted, int sorted_at,
                         __global const int *order, int order_at, __global T *chunks, int chunks_at, int inner,
                         int parts, int outer, int count)
{
    const int part = (int)get_global_id(1), a = (int)get_global_id(2);
    if (part >= parts || a >= outer)
        return;
    const int first = part * CHUNK, row = sorted[sorted_at + first];
    int end = min(count, first + CHUNK);
    if (part == 0 || sorted[sorted_at + first - 1] != row)
        end = first;
#pragma unroll 1
    for (int b = (int)get_global_id(0) * VW; b < inner; b += (int)get_global_size(0) * VW) {
        elements sum = (elements)(0);
#pragma unroll 1
        for (int i = first; i < end && sorted[sorted_at + i] == row; ++i)
            sum += LOAD(values + values_at + (a * count + order[order_at + i]) * inner + b);
        STORE(sum, chunks + chunks_at + (a * parts + part) * inner + b);
    }
}

__kernel void put(__global const T *x, int x_at, __global const T *values, int values_at, __global const int *order,
                  int order_at, __global const int *starts, int starts_at, __global const T *chunks, int chunks_at,
                  __global T *out, int out_at, int inner, int size, int outer, int count, int parts, int left_out)
{
    const int r = (int)get_global_id(1), a = (int)get_global_id(2);
    if (r >= size || a >= outer)
        return;
    const int first = starts[starts_at + r], end = r == left_out ? first : starts[starts_at + r + 1];
    const int boundary = (first / CHUNK + 1) * CHUNK, near_end = min(end, boundary);
#pragma unroll 1
    for (int b = (int)get_global_id(0) * VW; b < inner; b += (int)get_global_size(0) * VW) {
        const int place = (a * size + r) * inner + b;
        elements value = (elements)(0);
#if HAS_X
        value = LOAD(x + x_at + place);
#endif
#if ADD
        elements sum = (elements)(0);
#pragma unroll 1
        for (int i = first; i < near_end; ++i)
            sum += LOAD(values + values_at + (a * count + order[order_at + i]) * inner + b);
#pragma unroll 1
        for (int i = boundary; i < end; i += CHUNK)
            sum += LOAD(chunks + chunks_at + (a * parts + i / CHUNK) * inner + b);
        value = FITTED(value + sum);
#else
        if (end > first)
            value = LOAD(values + values_at + (a * count + order[order_at + end - 1]) * inner + b);
#endif
        STORE(value, out + out_at + place);
    }
}
