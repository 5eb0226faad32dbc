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

/* Of floats, `sum` is their own running sum and `rest` all that was rounded off it (Knuth's exact two-sum), so that the
   chain of dependent operations is one addition an element. Where sum is infinite or NaN, rest is NaN. */
#if IS_FLOAT
#define STATE float sum = 0.0f, rest = 0.0f
#define VALUE (rest == rest ? sum + rest : sum)
#define ADD(x) \
    { \
        const float next = (x), all = sum + next, part = all - sum; \
        rest += (sum - (all - part)) + (next - part); \
        sum = all; \
    }
#else
#define STATE ACC sum = 0
#define VALUE sum
#define ADD(x) sum += (x);
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
    STATE;
    if (part > 0)
        ADD(carry[carry_at + (a * segments + part) * columns + column])
#pragma unroll 1
    for (int i = first; i < last; ++i, from += columns, to += columns) {
        ADD(*from)
        *to = VALUE;
    }
}

__kernel void scan_carries(__global ACC *carry, int carry_at, int columns, int outer, int segments)
{
    const int column = (int)get_global_id(0), a = (int)get_global_id(1);
    if (column >= columns || a >= outer)
        return;
    __global ACC *at = carry + carry_at + a * segments * columns + column;
    STATE;
#pragma unroll 1
    for (int part = 0; part < segments; ++part, at += columns) {
        const ACC own = *at;
        *at = VALUE;
        ADD(own)
    }
}
