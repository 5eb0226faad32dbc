/* Running sums along one dimension: out[a, r, b] = sum of x[a, 0..r, b].

       x, out [A, R, B]; carry [A, S, B]      A outer, R along the sum, B inner; S segments of R

   scan_segments   an item walks one segment of one column; it starts with the sum of all elements before its segment
   scan_carries    turns the sums of the segments into that: the sum of those before, in place, by one item per column

   Assumed: x and out dense. Float sums are carried in two floats (sum and what was rounded off it), as the numpy and
   PyTorch backends carry theirs in double: every element is then rounded only once.

   IN   element type: float, int or long
   ACC  type of the sums: float or long; IS_FLOAT 1 if it is float */

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

/* A sum is s.x + s.y: the floats' own running sum, and all that was rounded off it (Knuth's exact two-sum). The chain of
   dependent operations is one addition an element. Infinities and NaN are in s.x. */
#if IS_FLOAT
#define STATE float2
static inline float2 plus(float2 sum, float x)
{
    const float total = sum.x + x;
    const float part = total - sum.x;
    return (float2)(total, sum.y + ((sum.x - (total - part)) + (x - part)));
}
static inline float value(float2 sum)
{
    return isfinite(sum.x) ? sum.x + sum.y : sum.x;
}
#else
#define STATE ACC
#define plus(sum, x) ((sum) + (x))
#define value(sum) (sum)
#endif

__kernel void scan_segments(__global const IN *x, int x_at, __global const ACC *carry, int carry_at, __global ACC *out,
                            int out_at, int columns, int length, int outer, int segment, int segments)
{
    const int column = (int)get_global_id(0), part = (int)get_global_id(1), a = (int)get_global_id(2);
    if (column >= columns || part >= segments || a >= outer)
        return;
    const int first = part * segment, last = min(length, first + segment);
    const int start = (a * length + first) * columns + column;
    __global const IN *from = x + x_at + start;
    __global ACC *to = out + out_at + start;
    STATE sum = (STATE)(0);
    if (part > 0)
        sum = plus(sum, carry[carry_at + (a * segments + part) * columns + column]);
#pragma unroll 1
    for (int i = first; i < last; ++i, from += columns, to += columns) {
        sum = plus(sum, *from);
        *to = value(sum);
    }
}

__kernel void scan_carries(__global ACC *carry, int carry_at, int columns, int outer, int segments)
{
    const int column = (int)get_global_id(0), a = (int)get_global_id(1);
    if (column >= columns || a >= outer)
        return;
    __global ACC *at = carry + carry_at + a * segments * columns + column;
    STATE sum = (STATE)(0);
#pragma unroll 1
    for (int part = 0; part < segments; ++part, at += columns) {
        const ACC own = *at;
        *at = value(sum);
        sum = plus(sum, own);
    }
}
