/* Elementwise functions for the kernels that are generated for chains of operators (apps/gradient/opencl/chain_text.py).

   One work-item handles VW neighbouring elements: `real` is that many floats and `ints` that many ints. A truth value
   is a mask of ints: 0 or not 0, and -1 for true where VW > 1 (OpenCL's vector comparisons); `x & 1` is 0 or 1 always.
   Everything here is a static inline function; the file has no kernel of its own.

   VW  elements of one work-item: 1, 2, 4, 8 or 16 */

#ifndef VW
#define VW 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#if VW == 1
typedef float real;
typedef int ints;
#define TO_REAL(x) convert_float(x)
#define TO_INTS(x) convert_int(x)
#define NOT(m) (!(m))
#define LOAD_REAL(i, p) ((p)[i])
#define LOAD_INTS(i, p) ((p)[i])
#define STORE(x, i, p) ((p)[i] = (x))
#else
typedef JOIN(float, VW) real;
typedef JOIN(int, VW) ints;
#define TO_REAL(x) JOIN(convert_float, VW)(x)
#define TO_INTS(x) JOIN(convert_int, VW)(x)
#define NOT(m) (~(m))
#define LOAD_REAL(i, p) JOIN(vload, VW)(i, p)
#define LOAD_INTS(i, p) JOIN(vload, VW)(i, p)
#define STORE(x, i, p) JOIN(vstore, VW)(x, i, p)
#endif

/* erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.9375, beyond which it is 1 in float32; the coefficients are those of the
   numpy backend, where they were fitted. NaN stays NaN. */
static inline real op_erf(real x)
{
    const real y = (x > (real)(3.9375f)) ? (real)(3.9375f) : ((x < (real)(-3.9375f)) ? (real)(-3.9375f) : x);
    const real s = y * y;
    real p = (real)(2.03592609396e-06f);
    real q = (real)(3.79390173675e-05f);
    p = p * s + 0.00028475821512f;
    q = q * s + 0.00116724725414f;
    p = p * s + 0.00379019479746f;
    q = q * s + 0.0150188024014f;
    p = p * s + 0.0528218025343f;
    q = q * s + 0.114369671147f;
    p = p * s + 0.191068665664f;
    q = q * s + 0.502662899639f;
    p = p * s + 1.12837914478f;
    q = q * s + 1.0f;
    return y * p / q;
}

/* In pairs where one would do: LLVM cannot compile the scalar pow() for the r600. */
static inline real op_pow(real x, real y)
{
#if VW == 1
    return pow((float2)(x, x), (float2)(y, y)).x;
#else
    return pow(x, y);
#endif
}

static inline real op_sign(real x)
{
    const ints above = x > (real)(0.0f);
    const ints below = x < (real)(0.0f);
    return TO_REAL((above & 1) - (below & 1));
}

/* NaN wins, as in PyTorch. */
static inline real op_maximum(real a, real b)
{
    const ints first = (a > b) | (a != a);
    return first ? a : b;
}

static inline real op_minimum(real a, real b)
{
    const ints first = (a < b) | (a != a);
    return first ? a : b;
}

static inline real op_relu(real x)
{
    const ints below = x <= (real)(0.0f);
    return below ? (real)(0.0f) : x;
}

static inline real op_sigmoid(real x)
{
    return (real)(1.0f) / ((real)(1.0f) + exp(-x));
}

static inline real op_silu(real x)
{
    return x / ((real)(1.0f) + exp(-x));
}

static inline real op_silu_backward(real grad, real x)
{
    const real s = op_sigmoid(x);
    return grad * s * ((real)(1.0f) + x * ((real)(1.0f) - s));
}

static inline real op_gelu(real x)
{
    return 0.5f * x * ((real)(1.0f) + op_erf(x * 0.70710678118654752f));
}

static inline real op_gelu_backward(real grad, real x)
{
    const real share = 0.5f * ((real)(1.0f) + op_erf(x * 0.70710678118654752f));
    const real density = exp(-0.5f * x * x) * 0.39894228040143268f;
    return grad * (share + x * density);
}

static inline real op_gelu_tanh(real x)
{
    const real inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * ((real)(1.0f) + tanh(inner));
}

static inline real op_gelu_tanh_backward(real grad, real x)
{
    const real t = tanh(0.79788456080286536f * (x + 0.044715f * x * x * x));
    const real slope = 0.79788456080286536f * ((real)(1.0f) + 0.134145f * x * x);
    return grad * (0.5f * ((real)(1.0f) + t) + 0.5f * x * ((real)(1.0f) - t * t) * slope);
}

/* The divisor's sign, as Python's %. */
static inline real op_remainder(real a, real b)
{
    const real r = fmod(a, b);
    const ints other_side = (r != (real)(0.0f)) & ((r < (real)(0.0f)) ^ (b < (real)(0.0f)));
    return other_side ? r + b : r;
}

/* As numpy: from the remainder, so that the two belong together. */
static inline real op_floor_divide(real a, real b)
{
    const real r = fmod(a, b);
    const ints other_side = (r != (real)(0.0f)) & ((r < (real)(0.0f)) ^ (b < (real)(0.0f)));
    real quotient = (a - r) / b;
    quotient = other_side ? quotient - (real)(1.0f) : quotient;
    real whole = floor(quotient);
    const ints short_of = (quotient - whole) > (real)(0.5f);
    whole = short_of ? whole + (real)(1.0f) : whole;
    const ints none = quotient == (real)(0.0f);
    whole = none ? copysign((real)(0.0f), a / b) : whole;
    const ints by_zero = b == (real)(0.0f);
    return by_zero ? a / b : whole;
}

#if VW == 1
/* Integer division: the caller has checked for a divisor of zero (then 1 is passed); -1 is apart because the lowest
   integer has no opposite. */
#define INTEGER_FUNCTIONS(T, NAME)                                                     \
    static inline T JOIN(NAME, _fmod)(T a, T b) { return b == -1 ? 0 : a % b; }        \
    static inline T JOIN(NAME, _remainder)(T a, T b)                                   \
    {                                                                                  \
        const T r = JOIN(NAME, _fmod)(a, b);                                           \
        return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r;                           \
    }                                                                                  \
    static inline T JOIN(NAME, _floor_divide)(T a, T b)                                \
    {                                                                                  \
        const T r = JOIN(NAME, _fmod)(a, b);                                           \
        const T q = b == -1 ? -a : a / b;                                              \
        return (r != 0 && ((r < 0) != (b < 0))) ? q - 1 : q;                           \
    }                                                                                  \
    static inline T JOIN(NAME, _pow)(T a, T b)                                         \
    {                                                                                  \
        T result = 1;                                                                  \
        for (; b > 0; b >>= 1) {                                                       \
            result = (b & 1) ? result * a : result;                                    \
            a *= a;                                                                    \
        }                                                                              \
        return result;                                                                 \
    }
INTEGER_FUNCTIONS(int, int)
INTEGER_FUNCTIONS(long, long)
#endif
