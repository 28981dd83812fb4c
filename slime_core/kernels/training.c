/* What the embedded trainer does between matrix products, forward and backward, on float32 rows laid end to end.

   Every function says what it computes in the names of `models/lean_autograd.py`, which has the same in torch. */

#include <math.h>
#include <stdint.h>

/* exp(x) to about 1 ulp, branchless so that loops of it become vectors: 2^n * e^r with |r| <= ln(2) / 2, the polynomial
   that of Cephes' expf. 0 below -87.3, where float32 has no normal number left; inf for inf, NaN for NaN. */
static inline float exp_(float x)
{
    float y = x < -87.3365f ? -87.3365f : x > 88.7228f ? 88.7228f : x;
    float n = rintf(y * 1.44269504f);
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, y));
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    float result = p * power.value;
    return x < -87.3365f ? 0.0f : x > 88.7228f ? INFINITY : x == x ? result : x;
}

/* out = silu(gate) * up */
void swiglu(const float *gate, const float *up, float *out, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        out[i] = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
}

void swiglu_backward(const float *gate, const float *up, const float *grad, float *grad_gate, float *grad_up, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + exp_(-gate[i])), g = gate[i] * s;
        grad_gate[i] = grad[i] * up[i] * (s + g * (1.0f - s));
        grad_up[i] = grad[i] * g;
    }
}
