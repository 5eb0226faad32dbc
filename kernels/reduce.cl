/* Reductions: out = combination of x over one dimension, and the index of the extreme value.

       x [A, R, B] -> out [A, B]      A outer, R reduced, B inner; S segments of R, P partial results

   reduce_rows_item    an item combines a row (B = 1, its elements follow one another), VW at a time
   reduce_rows_group   LANES items combine a row, in local memory at the end; ROWS rows in a group
   reduce_columns      an item combines NV VW neighbouring columns; items lie along B
   arg_rows_item, arg_rows_group, arg_columns, arg_partial   the same for the index of the extreme value

   Each writes one result for every segment of `segment` elements of R: out [A, S] or [A, S, B]. With more than one
   segment a second launch combines these. The order of all sums is fixed by the sizes and defines alone.
   Assumed: local size (LANES, ROWS, 1) in the group forms; VW = 1 where IN and ACC differ; LANES a power of two.

   IN     element type: float, int or long
   ACC    type of the result
   OP     OP_SUM, OP_PROD, OP_MAX or OP_MIN; truth values (0 and 1): any is OP_MAX, all is OP_MIN
   START  result of an empty row
   MEAN   1: divide the result by the argument `divisor`
   VW     elements that an item handles at once: 1, 2, 4, 8 or 16
   NV     vectors of an item of reduce_columns: several on processors, whose caches want whole lines
   LANES, ROWS  shape of a group; where LANES is defined, the file has the group forms only */

#define OP_SUM 0
#define OP_PROD 1
#define OP_MAX 2
#define OP_MIN 3

#ifndef IN
#define IN float
#define IS_FLOAT 1
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef IS_FLOAT
#define IS_FLOAT 0
#endif
#ifndef OP
#define OP OP_SUM
#endif
#ifndef START
#define START 0
#endif
#ifndef MEAN
#define MEAN 0
#endif
#ifndef VW
#define VW 1
#endif
#ifndef NV
#define NV 1
#endif
#ifndef ROWS
#define ROWS 1
#endif

#define CHAIN 64 /* additions in one chain, before its sum is added to another: rounding errors stay few */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
typedef ACC accs;
#define LOAD(p) ((ACC)*(p))
#define STORE(v, p) (*(p) = (v))
#else
typedef JOIN(ACC, VW) accs;
#define LOAD(p) JOIN(vload, VW)(0, p)
#define STORE(v, p) JOIN(vstore, VW)(v, 0, p)
#endif

/* NaN is the extreme of what it is compared with. */
#if OP == OP_SUM
#define COMBINE(a, b) ((a) + (b))
#elif OP == OP_PROD
#define COMBINE(a, b) ((a) * (b))
#elif IS_FLOAT && OP == OP_MAX
#define COMBINE(a, b) select(b, a, ((a) >= (b)) | isnan(a))
#elif IS_FLOAT
#define COMBINE(a, b) select(b, a, ((a) <= (b)) | isnan(a))
#elif OP == OP_MAX
#define COMBINE(a, b) max(a, b)
#else
#define COMBINE(a, b) min(a, b)
#endif

#if MEAN
#define RESULT(a) ((a) / divisor)
#else
#define RESULT(a) (a)
#endif

static inline ACC across(accs v)
{
#if VW == 1
    return v;
#elif VW == 2
    return COMBINE(v.x, v.y);
#else
    const JOIN(ACC, 4) four =
#if VW == 16
        COMBINE(COMBINE(v.s0123, v.s4567), COMBINE(v.s89ab, v.scdef));
#elif VW == 8
        COMBINE(v.s0123, v.s4567);
#else
        v;
#endif
    const ACC left = COMBINE(four.x, four.z), right = COMBINE(four.y, four.w);
    return COMBINE(left, right);
#endif
}

/* Elements first, first + step, ... below last of a row; step counts elements, VW of them are taken at once. */
static inline accs along(__global const IN *p, int first, int last, int step)
{
    accs all = (accs)(START);
    int i = first;
#pragma unroll 1
    while (i + VW <= last) {
        const int end = min(last, i + CHAIN * step);
        accs part = (accs)(START);
        for (; i + VW <= end; i += step) {
            const accs next = LOAD(p + i);
            part = COMBINE(part, next);
        }
        all = COMBINE(all, part);
    }
    return all;
}

#ifndef LANES

__kernel void reduce_rows_item(__global const IN *x, int x_at, __global ACC *out, int out_at, int rows, int length,
                               int row_stride, int segment, int segments, float divisor)
{
    const int row = (int)get_global_id(0), part = (int)get_global_id(1);
    if (row >= rows || part >= segments)
        return;
    __global const IN *p = x + x_at + row * row_stride;
    const int first = part * segment, last = min(length, first + segment);
    ACC all = across(along(p, first, last, VW));
#if VW > 1
#pragma unroll 1
    for (int i = first + (last - first) / VW * VW; i < last; ++i) {
        const ACC next = p[i];
        all = COMBINE(all, next);
    }
#endif
    out[out_at + row * segments + part] = RESULT(all);
}

__kernel void reduce_columns(__global const IN *x, int x_at, __global ACC *out, int out_at, int columns, int outer,
                             int length, int outer_stride, int row_stride, int column_stride, int segment,
                             int segments, float divisor)
{
    const int column = (int)get_global_id(0) * (VW * NV), a = (int)get_global_id(1), part = (int)get_global_id(2);
    if (column >= columns || a >= outer || part >= segments)
        return;
    const int first = part * segment, last = min(length, first + segment);
    __global const IN *p = x + x_at + a * outer_stride + column * column_stride + first * row_stride;
    accs all[NV];
#pragma unroll
    for (int v = 0; v < NV; ++v)
        all[v] = (accs)(START);
    int left = last - first;
#pragma unroll 1
    while (left > 0) {
        accs chain[NV];
#pragma unroll
        for (int v = 0; v < NV; ++v)
            chain[v] = (accs)(START);
        const int count = min(left, CHAIN);
        for (int i = 0; i < count; ++i, p += row_stride) {
#pragma unroll
            for (int v = 0; v < NV; ++v) {
                const accs next = LOAD(p + v * VW);
                chain[v] = COMBINE(chain[v], next);
            }
        }
#pragma unroll
        for (int v = 0; v < NV; ++v)
            all[v] = COMBINE(all[v], chain[v]);
        left -= count;
    }
    __global ACC *to = out + out_at + (a * segments + part) * columns + column;
#pragma unroll
    for (int v = 0; v < NV; ++v)
        STORE(RESULT(all[v]), to + v * VW);
}

#else

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void reduce_rows_group(__global const IN *x, int x_at, __global ACC *out, int out_at, int rows, int length,
                       int row_stride, int segment, int segments, float divisor)
{
    __local ACC shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1), part = (int)get_global_id(2);
    const int mine = (int)get_local_id(1) * LANES + lane;
    const int first = part * segment, last = row < rows ? min(length, first + segment) : first;
    __global const IN *p = x + x_at + row * row_stride;
    ACC all = across(along(p, first + lane * VW, last, LANES * VW));
#if VW > 1
#pragma unroll 1
    for (int i = first + (last - first) / VW * VW + lane; i < last; i += LANES) {
        const ACC next = p[i];
        all = COMBINE(all, next);
    }
#endif
    shared[mine] = all;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way) {
            const ACC one = shared[mine], other = shared[mine + half_way];
            shared[mine] = COMBINE(one, other);
        }
    }
    if (lane == 0 && row < rows)
        out[out_at + row * segments + part] = RESULT(shared[mine]);
}

#endif
