/* Where the extreme value is: out = index along R of the largest or smallest element; the first of equal ones, and NaN
   counts as the extreme.

       x [A, R, B] -> out [A, B]      A outer, R reduced, B inner; S segments of R

   arg_rows_item    an item searches a row (B = 1); arg_rows_group: LANES items do, ROWS rows in a group
   arg_columns      an item searches a column; items lie along B
   arg_segments     chooses among the candidates of each segment of a row, which arg_rows_... found

   The searches write one index for each segment of `segment` elements: found [A, S] or [A, S, B].
   Assumed: local size (LANES, ROWS, 1) in the group form; x dense; LANES a power of two.

   T            element type: float, int or long
   IS_FLOAT     1 if T is float
   SMALLEST     1: argmin
   LANES, ROWS  shape of a group; where LANES is defined, the file has the group form only
   OUT          type of the indices: int for candidates, long for the result */

#ifndef T
#define T float
#define IS_FLOAT 1
#endif
#ifndef IS_FLOAT
#define IS_FLOAT 0
#endif
#ifndef SMALLEST
#define SMALLEST 0
#endif
#ifndef OUT
#define OUT long
#endif
#ifndef ROWS
#define ROWS 1
#endif

#if SMALLEST
#define BEYOND(a, b) ((a) < (b))
#else
#define BEYOND(a, b) ((a) > (b))
#endif

/* Whether a is more extreme than b. */
static inline int beats(T a, T b)
{
#if IS_FLOAT
    return BEYOND(a, b) || (isnan(a) && !isnan(b));
#else
    return BEYOND(a, b);
#endif
}

/* The first extreme element among first, first + step, ...; there must be one. */
static inline int search(__global const T *p, int first, int last, int step, int stride)
{
    int best = first;
    T value = p[first * stride];
#pragma unroll 1
    for (int i = first + step; i < last; i += step) {
        const T next = p[i * stride];
        if (beats(next, value)) {
            value = next;
            best = i;
        }
    }
    return best;
}

#ifndef LANES

__kernel void arg_rows_item(__global const T *x, int x_at, __global OUT *found, int found_at, int rows, int length,
                            int segment, int segments)
{
    const int row = (int)get_global_id(0), part = (int)get_global_id(1);
    if (row >= rows || part >= segments)
        return;
    const int first = part * segment, last = min(length, first + segment);
    found[found_at + row * segments + part] = search(x + x_at + row * length, first, last, 1, 1);
}

__kernel void arg_columns(__global const T *x, int x_at, __global OUT *found, int found_at, int columns, int outer,
                          int length)
{
    const int column = (int)get_global_id(0), a = (int)get_global_id(1);
    if (column >= columns || a >= outer)
        return;
    found[found_at + a * columns + column] = search(x + x_at + a * length * columns + column, 0, length, 1, columns);
}

__kernel void arg_segments(__global const T *x, int x_at, __global const int *found, int found_at, __global long *out,
                           int out_at, int rows, int length, int segments)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    __global const T *p = x + x_at + row * length;
    __global const int *candidate = found + found_at + row * segments;
    int best = candidate[0];
    T value = p[best];
#pragma unroll 1
    for (int part = 1; part < segments; ++part) {
        const T next = p[candidate[part]];
        if (beats(next, value)) {
            value = next;
            best = candidate[part];
        }
    }
    out[out_at + row] = best;
}

#else

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void arg_rows_group(__global const T *x, int x_at, __global OUT *found, int found_at, int rows, int length, int segment,
                    int segments)
{
    __local T values[LANES * ROWS];
    __local int places[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1), part = (int)get_global_id(2);
    const int mine = (int)get_local_id(1) * LANES + lane;
    const int first = part * segment, last = min(length, first + segment);
    __global const T *p = x + x_at + min(row, rows - 1) * length;
    const int best = search(p, min(first + lane, last - 1), last, LANES, 1);
    values[mine] = p[best];
    places[mine] = best;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way) {
            const T one = values[mine], other = values[mine + half_way];
            const int here = places[mine], there = places[mine + half_way];
            if (beats(other, one) || (!beats(one, other) && there < here)) {
                values[mine] = other;
                places[mine] = there;
            }
        }
    }
    if (lane == 0 && row < rows)
        found[found_at + row * segments + part] = places[mine];
}

#endif
