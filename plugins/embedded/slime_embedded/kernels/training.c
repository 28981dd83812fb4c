/* What the embedded trainer does between matrix products, forward and backward, on float32 rows laid end to end.

   Names are those of `models/lean_autograd.py`, `models/packed.py` and `ops/logprobs.py`, which have the same in torch.
   Every row's sums are in an order that depends on that row alone. */

#define BLOCK 512 /* numbers added in float32 before their sum is added in float64 */

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
    union { int32_t bits; float value; } power = {((int32_t)n + 126) << 23};
    float result = p * power.value * 2.0f;
    return x < -87.3365f ? 0.0f : x > 88.7228f ? INFINITY : x == x ? result : x;
}

/* -- SwiGLU: out = silu(gate) * up ------------------------------------------------------------------------------ */

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

/* -- RMSNorm over n numbers, `cos` and `sin` NULL, or also rotated, [rows, heads, n] with [rows, n] of them ------- */

/* out = y * cos + (-second half of y, first half of y) * sin; with sign -1 the inverse */
static inline void rotated(const float *y, const float *cos, const float *sin, float *out, int64_t n, float sign)
{
    int64_t half = n / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = y[i], b = y[i + half];
        out[i] = a * cos[i] - sign * b * sin[i];
        out[i + half] = b * cos[i + half] + sign * a * sin[i + half];
    }
}

void norm(const float *x, const float *weight, const float *cos, const float *sin, float *out, int64_t rows, int64_t heads, int64_t n, float eps)
{
    float y[n];
    for (int64_t row = 0; row < rows * heads; row++, x += n, out += n) {
        float *to = cos ? y : out;
        float scale = weight ? scale_of(x, n, eps) : 1.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            to[i] = weight ? x[i] * scale * weight[i] : x[i];
        if (cos)
            rotated(y, cos + row / heads * n, sin + row / heads * n, out, n, 1.0f);
    }
}

/* With h = x * r, r = scale_of(x) and d = grad * weight: dx = r * (d - h * mean(d * h)), dweight = sum(grad * h).
   `grad_weight` NULL: it is frozen. */
void norm_backward(const float *x, const float *weight, const float *cos, const float *sin, const float *grad, float *grad_x, float *grad_weight, int64_t rows, int64_t heads, int64_t n, float eps)
{
    float y[n], part[n];
    double *total = calloc((size_t)n, sizeof(double));
    for (int64_t i = 0; i < n; i++)
        part[i] = 0.0f;
    for (int64_t row = 0; row < rows * heads; row++, x += n, grad += n, grad_x += n) {
        const float *g = grad;
        if (cos) {
            rotated(grad, cos + row / heads * n, sin + row / heads * n, weight ? y : grad_x, n, -1.0f);
            g = y;
        }
        if (!weight)
            continue;
        float scale = scale_of(x, n, eps), mean = dot(x, g, weight, n) * scale / (float)n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            part[i] += g[i] * (x[i] * scale);
            grad_x[i] = scale * (g[i] * weight[i] - x[i] * scale * mean);
        }
        if (row % 64 == 63 || row == rows * heads - 1)
            for (int64_t i = 0; i < n; i++) {
                total[i] += part[i];
                part[i] = 0.0f;
            }
    }
    for (int64_t i = 0; grad_weight && i < n; i++)
        grad_weight[i] = (float)total[i];
    free(total);
}

/* -- log-probs and entropies of rows of logits [rows, n] ----------------------------------------------------------- */

void log_probs(const float *z, const int64_t *targets, float *found, float *norms, float *entropies, int64_t rows, int64_t n, float temperature)
{
    for (int64_t row = 0; row < rows; row++, z += n) {
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < n; i++) {
            float scaled = z[i] / temperature;
            top = scaled > top ? scaled : top;
        }
        double total = 0.0, moment = 0.0;
        for (int64_t from = 0; from < n; from += BLOCK) {
            float sum = 0.0f, first = 0.0f;
            int64_t to = least(n, from + BLOCK);
#pragma omp simd reduction(+ : sum, first)
            for (int64_t i = from; i < to; i++) {
                float d = z[i] / temperature - top, e = exp_(d);
                sum += e;
                first += e > 0.0f ? e * d : 0.0f; /* a logit of -inf adds 0 */
            }
            total += sum;
            moment += first;
        }
        double log_total = log(total);
        norms[row] = (float)(top + log_total);
        found[row] = (float)(z[targets[row]] / temperature - top - log_total);
        if (entropies)
            entropies[row] = (float)(log_total - moment / total);
    }
}

/* z -> the gradient with respect to the logits: (grad * ([j = target] - p_j) - grad_entropy * p_j * (log p_j + H)) / t */
void log_probs_backward(float *z, const int64_t *targets, const float *norms, const float *entropies, const float *grad, const float *grad_entropy, int64_t rows, int64_t n, float temperature)
{
    for (int64_t row = 0; row < rows; row++, z += n) {
        float g = grad ? grad[row] : 0.0f, h = grad_entropy ? grad_entropy[row] : 0.0f;
        float entropy = grad_entropy ? entropies[row] : 0.0f, norm = norms[row], inverse = 1.0f / temperature;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float log_p = z[i] / temperature - norm, p = exp_(log_p);
            float finite = p > 0.0f ? log_p : 0.0f;
            z[i] = -p * (g + h * (finite + entropy)) * inverse;
        }
        z[targets[row]] += g * inverse;
    }
}

/* -- causal attention of packed sequences ---------------------------------------------------------------------------

   Token t of a sequence is row `rows[t]` of q [., heads * dim], k and v [., kv_heads * dim], and its result row `to[t]`
   of out [., heads * dim] and lse [., heads], the log of the sum of its weights; -1: no result is asked for. `starts`
   [sequences + 1] says where each sequence's tokens begin. dim is a multiple of 16. */

#define QUERIES 8 /* taken together */

/* s[4, stride] = a[4, dim] b[dim, width], for LANES columns or (`both`) twice as many */
INLINE void scores_of(const float *restrict a, const float *restrict b, float *restrict s, int64_t dim, int64_t width, int64_t stride, int both)
{
    vec sums[4][2] = {0};
    for (int64_t d = 0; d < dim; d++) {
        vec left = load(b + d * width), right = both ? load(b + d * width + LANES) : left;
        for (int r = 0; r < 4; r++) {
            sums[r][0] += a[r * dim + d] * left;
            if (both)
                sums[r][1] += a[r * dim + d] * right;
        }
    }
    for (int r = 0; r < 4; r++) {
        store(s + r * stride, sums[r][0]);
        if (both)
            store(s + r * stride + LANES, sums[r][1]);
    }
}

INLINE void scores(const float *restrict a, const float *restrict b, float *restrict s, int64_t dim, int64_t count, int64_t width, int64_t stride)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= count; j += 2 * LANES)
        scores_of(a, b + j, s + j, dim, width, stride, 1);
    if (j < count)
        scores_of(a, b + j, s + j, dim, width, stride, 0);
}

/* out[4, dim] = s[4, stride] b[count, dim] */
INLINE void mixed(const float *restrict s, const float *restrict b, float *restrict out, int64_t dim, int64_t count, int64_t stride)
{
    for (int64_t d = 0; d < dim; d += LANES) {
        vec sums[4] = {0}, more[4] = {0};
        for (int64_t j = 0; j < count; j += 2) {
            vec even = load(b + j * dim + d), odd = load(b + (j + 1) * dim + d);
            for (int r = 0; r < 4; r++) {
                sums[r] += s[r * stride + j] * even;
                more[r] += s[r * stride + j + 1] * odd;
            }
        }
        for (int r = 0; r < 4; r++)
            store(out + r * dim + d, sums[r] + more[r]);
    }
}

/* total[count, dim] += s[QUERIES, stride]^T a[QUERIES, dim] */
INLINE void added(const float *restrict s, const float *restrict a, float *restrict total, int64_t dim, int64_t count, int64_t stride)
{
    for (int64_t d = 0; d < dim; d += LANES)
        for (int64_t j = 0; j < count; j++) {
            vec sum = load(total + j * dim + d);
            for (int r = 0; r < QUERIES; r++)
                sum += s[r * stride + j] * load(a + r * dim + d);
            store(total + j * dim + d, sum);
        }
}

#define BY_SIZE(dim)               /* loops of a known length keep their sums in registers */ \
    switch (dim) {                 \
        case 32: OF(32); break;    \
        case 64: OF(64); break;    \
        case 128: OF(128); break;  \
        default: OF(dim);          \
    }

static int64_t longest(const int64_t *starts, int64_t sequences)
{
    int64_t found = 1;
    for (int64_t i = 0; i < sequences; i++)
        found = starts[i + 1] - starts[i] > found ? starts[i + 1] - starts[i] : found;
    return (found + LANES - 1) / LANES * LANES;
}

/* A head's rows of x [., width] as [length, dim] and [dim, length], up to `padded` with zeros; either may be NULL. */
INLINE void gathered(const float *x, const int64_t *rows, int64_t length, int64_t padded, int64_t width, int64_t dim, float *straight, float *turned)
{
    float some[LANES * dim];
    for (int64_t t = 0; t < padded; t += LANES) {
        float *to = straight ? straight + t * dim : some;
        for (int64_t i = 0; i < LANES; i++)
            for (int64_t d = 0; d < dim; d += LANES)
                store(to + i * dim + d, t + i < length ? load(x + rows[t + i] * width + d) : (vec){0});
        for (int64_t d = 0; turned && d < dim; d += LANES)
            turn(to + d, dim, turned + d * padded + t, padded);
    }
}

/* The next queries of a sequence from token `*from` on: their places; how many there are. */
static int64_t next_queries(const int64_t *to, int64_t length, int64_t *from, int64_t *places)
{
    int64_t found = 0;
    for (; *from < length && found < QUERIES; ++*from)
        if (to[*from] >= 0)
            places[found++] = *from;
    return found;
}

INLINE void attend_of(const float *q, const float *k, const float *v, const int64_t *rows, const int64_t *to, const int64_t *starts, float *out, float *lse, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, float scale)
{
    int64_t most = longest(starts, sequences), places[QUERIES], share = heads / kv_heads;
    float *keys = room_for(2 * most * dim + QUERIES * (most + 2 * dim));
    float *values = keys + most * dim, *s = values + most * dim, *a = s + QUERIES * most, *result = a + QUERIES * dim;
    memset(a, 0, sizeof(float) * (size_t)(QUERIES * dim));
    for (int64_t i = 0; i < sequences; i++) {
        const int64_t *row = rows + starts[i], *at = to + starts[i];
        int64_t length = starts[i + 1] - starts[i], padded = (length + LANES - 1) / LANES * LANES;
        for (int64_t g = 0; g < kv_heads; g++) {
            gathered(k + g * dim, row, length, padded, kv_heads * dim, dim, NULL, keys);
            gathered(v + g * dim, row, length, padded, kv_heads * dim, dim, values, NULL);
            for (int64_t from = 0, count; (count = next_queries(at, length, &from, places));) {
                int64_t seen = (places[count - 1] + LANES) / LANES * LANES;
                for (int64_t h = g * share; h < (g + 1) * share; h++) {
                    for (int64_t r = 0; r < count; r++)
                        for (int64_t d = 0; d < dim; d++)
                            a[r * dim + d] = q[(row[places[r]] * heads + h) * dim + d] * scale;
                    for (int64_t r = 0; r < count; r += 4)
                        scores(a + r * dim, keys, s + r * most, dim, seen, padded, most);
                    float totals[QUERIES];
                    for (int64_t r = 0; r < count; r++) { /* by vectors: of numbers, a compiler takes some alone, up to an aligned one */
                        float *w = s + r * most;
                        int64_t own = places[r] + 1;
                        vec tops = all(-INFINITY), total = {0};
                        for (int64_t j = 0; j < own; j += LANES) {
                            vec x = leading(own - j, load(w + j), all(-INFINITY));
                            tops = choose(x > tops, x, tops);
                        }
                        float top = largest(tops);
                        for (int64_t j = 0; j < seen; j += LANES) {
                            vec x = leading(own - j, exponential(load(w + j) - top), all(0));
                            total += x;
                            store(w + j, x);
                        }
                        totals[r] = sum(total);
                        lse[at[places[r]] * heads + h] = top + logf(totals[r]);
                    }
                    for (int64_t r = 0; r < count; r += 4)
                        mixed(s + r * most, values, result + r * dim, dim, seen, most);
                    for (int64_t r = 0; r < count; r++)
                        for (int64_t d = 0; d < dim; d++)
                            out[(at[places[r]] * heads + h) * dim + d] = result[r * dim + d] / totals[r];
                }
            }
        }
    }
    free(keys);
}

/* Adds to grad_q, grad_k and grad_v, which begin as zeros. */
INLINE void attend_backward_of(const float *q, const float *k, const float *v, const int64_t *rows, const int64_t *to, const int64_t *starts, const float *out, const float *lse, const float *grad, float *grad_q, float *grad_k, float *grad_v, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, float scale)
{
    int64_t most = longest(starts, sequences), places[QUERIES], share = heads / kv_heads;
    float *keys = room_for(5 * most * dim + QUERIES * (2 * most + 3 * dim));
    float *turned = keys + most * dim, *values = turned + most * dim, *dk = values + most * dim, *dv = dk + most * dim;
    float *p = dv + most * dim, *s = p + QUERIES * most, *a = s + QUERIES * most, *o = a + QUERIES * dim, *dq = o + QUERIES * dim;
    for (int64_t i = 0; i < sequences; i++) {
        const int64_t *row = rows + starts[i], *at = to + starts[i];
        int64_t length = starts[i + 1] - starts[i], padded = (length + LANES - 1) / LANES * LANES, width = kv_heads * dim;
        for (int64_t g = 0; g < kv_heads; g++) {
            gathered(k + g * dim, row, length, padded, width, dim, keys, turned);
            gathered(v + g * dim, row, length, padded, width, dim, NULL, values);
            memset(dk, 0, sizeof(float) * (size_t)(2 * most * dim));
            for (int64_t from = 0, count; (count = next_queries(at, length, &from, places));) {
                int64_t seen = (places[count - 1] + LANES) / LANES * LANES;
                for (int64_t h = g * share; h < (g + 1) * share; h++) {
                    float delta[QUERIES];
                    for (int64_t r = 0; r < QUERIES; r++) {
                        int64_t mine = r < count ? row[places[r]] * heads + h : 0, its = r < count ? at[places[r]] * heads + h : 0;
                        float sum = 0.0f, used = r < count ? 1.0f : 0.0f;
#pragma omp simd reduction(+ : sum)
                        for (int64_t d = 0; d < dim; d++) {
                            a[r * dim + d] = used * q[mine * dim + d] * scale;
                            o[r * dim + d] = r < count ? grad[its * dim + d] : 0.0f;
                            sum += o[r * dim + d] * out[its * dim + d];
                        }
                        delta[r] = sum;
                    }
                    for (int64_t r = 0; r < QUERIES; r += 4) {
                        scores(a + r * dim, turned, p + r * most, dim, seen, padded, most);
                        scores(o + r * dim, values, s + r * most, dim, seen, padded, most);
                    }
                    for (int64_t r = 0; r < QUERIES; r++) {
                        float *w = p + r * most, *ds = s + r * most, norm = r < count ? lse[at[places[r]] * heads + h] : 0.0f;
                        int64_t own = r < count ? places[r] + 1 : 0;
                        for (int64_t j = 0; j < seen; j += LANES) {
                            vec x = leading(own - j, exponential(load(w + j) - norm), all(0));
                            store(w + j, x);
                            store(ds + j, x * (load(ds + j) - delta[r]));
                        }
                    }
                    for (int64_t r = 0; r < QUERIES; r += 4)
                        mixed(s + r * most, keys, dq + r * dim, dim, seen, most);
                    for (int64_t r = 0; r < count; r++)
                        for (int64_t d = 0; d < dim; d++)
                            grad_q[(row[places[r]] * heads + h) * dim + d] += dq[r * dim + d] * scale;
                    added(s, a, dk, dim, seen, most);
                    added(p, o, dv, dim, seen, most);
                }
            }
            for (int64_t t = 0; t < length; t++)
                for (int64_t d = 0; d < dim; d++) {
                    grad_k[row[t] * width + g * dim + d] += dk[t * dim + d];
                    grad_v[row[t] * width + g * dim + d] += dv[t * dim + d];
                }
        }
    }
    free(keys);
}

void attend(const float *q, const float *k, const float *v, const int64_t *rows, const int64_t *to, const int64_t *starts, float *out, float *lse, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, float scale)
{
#define OF(size) attend_of(q, k, v, rows, to, starts, out, lse, sequences, heads, kv_heads, size, scale)
    BY_SIZE(dim)
#undef OF
}

void attend_backward(const float *q, const float *k, const float *v, const int64_t *rows, const int64_t *to, const int64_t *starts, const float *out, const float *lse, const float *grad, float *grad_q, float *grad_k, float *grad_v, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, float scale)
{
#define OF(size) attend_backward_of(q, k, v, rows, to, starts, out, lse, grad, grad_q, grad_k, grad_v, sequences, heads, kv_heads, size, scale)
    BY_SIZE(dim)
#undef OF
}
