/* Pooling over planes: maximum with its place, and average; forward and backward.
 *
 * Shapes: x [P, H, W], y, grad and places [P, OH, OW], dense; P planes (samples times channels). A place counts the
 * elements of a plane of x. Window (oh, ow) starts at (oh * SH - PH, ow * SW - PW) and has KH x KW elements, DH and DW
 * apart; those outside the plane are left out.
 *
 * Kernels (dimension 0 walks the last axis, 1 the one before, 2 the planes, unless noted):
 *   max_pool           the maximum, NaN above all, and where it is first (a NaN: last)
 *   max_pool_check     strange[p][oh] = whether a place of the row lies outside its window (dimension 0 walks rows, 1
 *                      planes); a place outside the plane is a fault
 *   max_pool_strange   whole[p] = whether any row of the plane is strange (dimension 0 walks planes)
 *   max_pool_gather    the gradient of x where no place is strange: each element looks at the windows that meet it
 *   max_pool_scatter   the gradient of x of a plane with strange places, by one item in order (dimension 0 walks planes)
 *   avg_pool           the average
 *   avg_pool_backward  the gradient of x: each element looks at the windows that meet it
 * An average's divisor is `divisor` if that is not 0; else the number of elements of the window within the plane, with
 * PADDED within the plane and its padding.
 */

#ifndef PADDED
#define PADDED 1
#endif

#define GEOMETRY                                                                                                       \
    int H, int W, int OH, int OW, int KH, int KW, int SH, int SW, int PH, int PW, int DH, int DW

__kernel void max_pool(__global const float *restrict x, int x_at, GEOMETRY, int planes, __global float *restrict y,
                       int y_at, __global long *restrict places, int places_at)
{
    const int ow = get_global_id(0), oh = get_global_id(1), plane = get_global_id(2);
    if (ow >= OW || oh >= OH || plane >= planes)
        return;
    x += x_at + plane * H * W;
    int top = oh * SH - PH, left = ow * SW - PW;
    /* Rows and columns of the window within the plane. */
    const int first_h = top < 0 ? (DH - 1 - top) / DH : 0, first_w = left < 0 ? (DW - 1 - left) / DW : 0;
    float best = -INFINITY;
    int place = (top + first_h * DH) * W + left + first_w * DW;
#pragma unroll 1
    for (int kh = first_h; kh < KH && top + kh * DH < H; kh++) {
#pragma unroll 1
        for (int kw = first_w; kw < KW && left + kw * DW < W; kw++) {
            const int at = (top + kh * DH) * W + left + kw * DW;
            const float value = x[at];
            if (value > best || isnan(value)) {
                best = value;
                place = at;
            }
        }
    }
    const int at = (plane * OH + oh) * OW + ow;
    y[y_at + at] = best;
    places[places_at + at] = place;
}

__kernel void max_pool_check(__global const long *restrict places, int places_at, GEOMETRY, int planes,
                             __global int *restrict strange, int strange_at, __global int *fault, int fault_at,
                             int node)
{
    const int oh = get_global_id(0), plane = get_global_id(1);
    if (oh >= OH || plane >= planes)
        return;
    places += places_at + (plane * OH + oh) * OW;
    int found = 0;
#pragma unroll 1
    for (int ow = 0; ow < OW; ow++) {
        const long given = places[ow];
        if (given < 0 || given >= H * W) {
            fault[fault_at] = node + 1;
            fault[fault_at + 1] = (int)given;
            found = 1;
        } else {
            const int place = (int)given, h = place / W, w = place - h * W;
            const int y = h - (oh * SH - PH), z = w - (ow * SW - PW), kh = y / DH, kw = z / DW;
            found |= y < 0 || z < 0 || kh * DH != y || kw * DW != z || kh >= KH || kw >= KW;
        }
    }
    strange[strange_at + plane * OH + oh] = found;
}

__kernel void max_pool_strange(__global const int *restrict strange, int strange_at, int planes, int OH,
                               __global int *restrict whole, int whole_at)
{
    const int plane = get_global_id(0);
    if (plane >= planes)
        return;
    int found = 0;
#pragma unroll 1
    for (int oh = 0; oh < OH; oh++)
        found |= strange[strange_at + plane * OH + oh];
    whole[whole_at + plane] = found;
}

__kernel void max_pool_gather(__global const float *restrict grad, int grad_at, __global const long *restrict places,
                              int places_at, __global const int *restrict whole, int whole_at, GEOMETRY, int planes,
                              __global float *restrict x, int x_at)
{
    const int w = get_global_id(0), h = get_global_id(1), plane = get_global_id(2);
    if (w >= W || h >= H || plane >= planes || whole[whole_at + plane])
        return;
    grad += grad_at + plane * OH * OW;
    places += places_at + plane * OH * OW;
    float sum = 0.0f;
#pragma unroll 1
    for (int kh = 0; kh < KH; kh++) {
        const int y = h + PH - kh * DH, oh = y / SH, high = y >= 0 && oh * SH == y && oh < OH;
#pragma unroll 1
        for (int kw = 0; kw < KW; kw++) {
            const int z = w + PW - kw * DW, ow = z / SW;
            if (high && z >= 0 && ow * SW == z && ow < OW && places[oh * OW + ow] == h * W + w)
                sum += grad[oh * OW + ow];
        }
    }
    x[x_at + (plane * H + h) * W + w] = sum;
}

__kernel void max_pool_scatter(__global const float *restrict grad, int grad_at, __global const long *restrict places,
                               int places_at, __global const int *restrict whole, int whole_at, GEOMETRY, int planes,
                               __global float *restrict x, int x_at)
{
    const int plane = get_global_id(0);
    if (plane >= planes || !whole[whole_at + plane])
        return;
    grad += grad_at + plane * OH * OW;
    places += places_at + plane * OH * OW;
    x += x_at + plane * H * W;
#pragma unroll 1
    for (int at = 0; at < H * W; at++)
        x[at] = 0.0f;
#pragma unroll 1
    for (int l = 0; l < OH * OW; l++) {
        const long place = places[l];
        if (place >= 0 && place < H * W)
            x[(int)place] += grad[l];
    }
}

static inline float divisor_of(int oh, int ow, int divisor, GEOMETRY)
{
    int top = oh * SH - PH, left = ow * SW - PW;
#if PADDED
    const int bottom = min(top + KH, H + PH), right = min(left + KW, W + PW);
#else
    const int bottom = min(top + KH, H), right = min(left + KW, W);
    top = max(top, 0);
    left = max(left, 0);
#endif
    return (float)(divisor ? divisor : (bottom - top) * (right - left));
}

#define GIVEN H, W, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW

__kernel void avg_pool(__global const float *restrict x, int x_at, GEOMETRY, int planes, int divisor,
                       __global float *restrict y, int y_at)
{
    const int ow = get_global_id(0), oh = get_global_id(1), plane = get_global_id(2);
    if (ow >= OW || oh >= OH || plane >= planes)
        return;
    x += x_at + plane * H * W;
    const int top = oh * SH - PH, left = ow * SW - PW;
    float sum = 0.0f;
#pragma unroll 1
    for (int h = max(top, 0); h < min(top + KH, H); h++) {
#pragma unroll 1
        for (int w = max(left, 0); w < min(left + KW, W); w++)
            sum += x[h * W + w];
    }
    y[y_at + (plane * OH + oh) * OW + ow] = sum / divisor_of(oh, ow, divisor, GIVEN);
}

__kernel void avg_pool_backward(__global const float *restrict grad, int grad_at, GEOMETRY, int planes, int divisor,
                                __global float *restrict x, int x_at)
{
    const int w = get_global_id(0), h = get_global_id(1), plane = get_global_id(2);
    if (w >= W || h >= H || plane >= planes)
        return;
    grad += grad_at + plane * OH * OW;
    /* The windows that meet (h, w): a window starts within the KH - 1 rows before it, or on it. */
    const int y = h + PH, z = w + PW;
    const int first_h = y < KH ? 0 : (y - KH) / SH + 1, first_w = z < KW ? 0 : (z - KW) / SW + 1;
    float sum = 0.0f;
#pragma unroll 1
    for (int oh = first_h; oh < OH && oh * SH <= y; oh++) {
#pragma unroll 1
        for (int ow = first_w; ow < OW && ow * SW <= z; ow++)
            sum += grad[oh * OW + ow] / divisor_of(oh, ow, divisor, GIVEN);
    }
    x[x_at + (plane * H + h) * W + w] = sum;
}
