/* Products of float32 matrices, which both sources beside this one use: it is compiled in front of either.

   Every number of a result is summed in one order, whatever rows are beside its own. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#define EACH(f, w, add) {f(0, w, add), f(1, w, add), f(2, w, add), f(3, w, add), f(4, w, add), f(5, w, add), \
    f(6, w, add), f(7, w, add), f(8, w, add), f(9, w, add), f(10, w, add), f(11, w, add), f(12, w, add), \
    f(13, w, add), f(14, w, add), f(15, w, add)}
#else
#define LANES 8
#define VECTORS 2
#define EACH(f, w, add) {f(0, w, add), f(1, w, add), f(2, w, add), f(3, w, add), f(4, w, add), f(5, w, add), \
    f(6, w, add), f(7, w, add)}
#endif

#define TILE 64   /* columns of a piece of a packed matrix, [out / TILE, in, TILE] */
#define ROWS 6    /* rows of a product that share what is read of the matrix */
#define SPAN (1 << 16) /* numbers of a product's rows that stay in the cache while the matrix goes by */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec x) { *(vec *)at = x; }
#if defined(__AVX512F__)
INLINE void store_past(float *at, vec x) { _mm512_stream_ps(at, (__m512)x); }
INLINE void all_stored(void) { _mm_sfence(); } /* before another thread is told of it */
#else
INLINE void store_past(float *at, vec x) { store(at, x); }
INLINE void all_stored(void) {}
#endif
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ints where, vec x, vec y) { return (vec)((where & (ints)x) | (~where & (ints)y)); }

/* x * y + z in one step, told so: left to itself a compiler takes two where only one sum is made, and sums of a row then
   depend on how many rows are beside it. */
INLINE vec fused(vec x, vec y, vec z) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return x * y + z;
#endif
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* -- of one vector ------------------------------------------------------------------------------------------------- */

/* Cephes' expf: 2^n * polynomial(r). NaN stays NaN; what would underflow or overflow is the nearest that does not. */
INLINE vec exponential(vec x) {
    x = choose(x < -87.3f, all(-87.3f), x);
    x = choose(x > 88.3f, all(88.3f), x);
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
             + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

#define NUMBER(o, w, add) (o)
#define NUMBERS (ints)EACH(NUMBER, 0, 0)
/* The first `count` of x, the others of y. */
INLINE vec leading(int64_t count, vec x, vec y) { return choose(NUMBERS < (int32_t)count, x, y); }

/* In lane i what x has in lane i ^ w: halves of halves, until every lane has met all others. */
INLINE vec beside(vec x, int w) { return __builtin_shuffle(x, NUMBERS ^ w); }

INLINE float sum(vec x) {
#pragma GCC unroll 4
    for (int w = LANES / 2; w; w /= 2) x += beside(x, w);
    return x[0];
}

INLINE float largest(vec x) {
#pragma GCC unroll 4
    for (int w = LANES / 2; w; w /= 2) {
        vec y = beside(x, w);
        x = choose(y > x, y, x);
    }
    return x[0];
}

/* sum of x * (y * z) over n numbers, NULL of them being 1 */
INLINE float dot(const float *x, const float *y, const float *z, int64_t n) {
    vec total = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec factor = load(y + i);
        if (z) factor *= load(z + i);
        total += load(x + i) * factor;
    }
    float found = sum(total);
    for (; i < n; i++) found += x[i] * (z ? y[i] * z[i] : y[i]);
    return found;
}

/* What RMSNorm multiplies x with, besides its weight. */
INLINE float scale_of(const float *x, int64_t n, float eps) { return 1.0f / sqrtf(dot(x, x, NULL, n) / (float)n + eps); }

/* y [rows, out], of it the first VECTORS * LANES columns, = bias (NULL: 0; `add`: y itself) + sum over `size` numbers of
   x [rows, size] times tile [size, ..]. A row of x is `across` after the one before, its numbers `along` apart; rows of
   the tile are `width` apart, those of y `step`. All of the tile's columns are read, those of y beyond `out` not written. */
INLINE void block(int rows, int vectors, int64_t size, int64_t out, const float *x, int64_t across, int64_t along,
                  const float *tile, int64_t width, const float *bias, int add, float *y, int64_t step) {
    vec total[ROWS][VECTORS] = {0};
    for (int64_t k = 0; k < size; k++) {
        vec w[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) w[j] = load(tile + k * width + j * LANES);
#pragma GCC unroll 6 /* one number of x at a time, which leaves registers for all sums */
        for (int r = 0; r < rows; r++) {
            vec one = all(x[r * across + k * along]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) total[r][j] = fused(one, w[j], total[r][j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            int64_t first = j * LANES, left = out - first;
            float *to = y + r * step + first;
            vec v = total[r][j];
            if (left >= LANES) {
                if (bias) v += load(bias + first);
                if (add) v += load(to);
                store(to, v);
            } else
                for (int64_t i = 0; i < left; i++) {
                    float one = bias ? v[i] + bias[first + i] : v[i];
                    to[i] = add ? to[i] + one : one;
                }
        }
}

/* BLOCK(rows), which takes them from row r on, for all of `n` rows */
#define ALL_ROWS(n)                          \
    int64_t r = 0;                           \
    for (; r + ROWS <= (n); r += ROWS) BLOCK(ROWS); \
    switch ((n) - r) {                       \
        case 1: BLOCK(1); break;             \
        case 2: BLOCK(2); break;             \
        case 3: BLOCK(3); break;             \
        case 4: BLOCK(4); break;             \
        case 5: BLOCK(5); break;             \
    }

/* y [n, out] = x [n, size] @ tiles [out / TILE, size, TILE], the last one padded, + bias [out] or NULL; `add`: += */
void linear(int64_t n, int64_t size, int64_t out, const float *x, const float *tiles, const float *bias, int64_t add,
            float *y) {
    int64_t span = SPAN / size / ROWS * ROWS;
    span = span > ROWS ? span : ROWS;
    for (int64_t first = 0; first < n; first += span, x += span * size, y += span * out) {
        int64_t rows = least(span, n - first);
        for (int64_t c = 0; c < out; c += VECTORS * LANES) {
            const float *tile = tiles + c / TILE * TILE * size + c % TILE, *b = bias ? bias + c : 0;
#define OF(m, vectors) block(m, vectors, size, out - c, x + r * size, size, 1, tile, TILE, b, add, y + r * out + c, out)
#define BLOCK(m) OF(m, VECTORS)
            if (out - c > LANES) { ALL_ROWS(rows) }
#undef BLOCK
#define BLOCK(m) OF(m, 1)
            if (out - c <= LANES) { ALL_ROWS(rows) }
#undef BLOCK
#undef OF
        }
    }
}

/* total [out, size] += grad [n, out]^T @ x [n, size], `span` rows after the other; size is a multiple of LANES */
INLINE void add_outer(int64_t n, int64_t size, int64_t out, const float *x, const float *grad, float *total) {
    int64_t span = 128;
    for (int64_t first = 0; first < n; first += span, x += span * size, grad += span * out) {
        int64_t rows = least(span, n - first), c = 0;
#define BLOCK(m) block(m, VECTORS, rows, size, grad + r, 1, out, x + c, size, 0, 1, total + r * size + c, size)
        for (; c + VECTORS * LANES <= size; c += VECTORS * LANES) { ALL_ROWS(out) }
#undef BLOCK
#define BLOCK(m) block(m, 1, rows, size, grad + r, 1, out, x + c, size, 0, 1, total + r * size + c, size)
        for (; c < size; c += LANES) { ALL_ROWS(out) }
#undef BLOCK
    }
}

/* Lane o of x[i] -> lane i of x[o]: every exchange swaps one bit of the two. */
#define STAYS(o, w, add) ((o) & (w) ? LANES + (o) - (w) : (o))
#define MOVES(o, w, add) ((o) & (w) ? LANES + (o) : (o) + (w))
#define EXCHANGE(w)                                                          \
    for (int i = 0; i < LANES; i++)                                          \
        if (!(i & w)) {                                                      \
            vec low = x[i], high = x[i + w];                                 \
            x[i] = __builtin_shuffle(low, high, (ints)EACH(STAYS, w, 0));    \
            x[i + w] = __builtin_shuffle(low, high, (ints)EACH(MOVES, w, 0)); \
        }
INLINE void transpose(vec *x) {
    EXCHANGE(1) EXCHANGE(2) EXCHANGE(4)
#if LANES == 16
    EXCHANGE(8)
#endif
}

/* to [LANES, LANES] = the transpose of from; their rows are `step` and `across` apart */
INLINE void turn(const float *from, int64_t across, float *to, int64_t step) {
    vec x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load(from + i * across);
    transpose(x);
    for (int i = 0; i < LANES; i++) store(to + i * step, x[i]);
}

/* weight [out, size] -> the rows from `first`, a multiple of LANES, of tiles [.. / TILE, size, TILE]; what the last one has
   too many is left as it is. `dim`: rows i and i + dim / 2 of every dim come side by side; 0: all stay where they are.
   `past`: a vector that is a cache line bypasses the cache, which would read the line first; for what is not read soon. */
INLINE void packed(int64_t out, int64_t size, const float *weight, float *tiles, int64_t first, int64_t dim, int past) {
    for (int64_t r = 0; r < out; r += LANES) {
        int64_t rows = least(LANES, out - r);
        float *to = tiles + (first + r) / TILE * TILE * size + (first + r) % TILE;
        const float *from[LANES];
        for (int64_t i = r; i < r + rows; i++)
            from[i - r] = weight + (dim ? i / dim * dim + i % dim / 2 + i % 2 * (dim / 2) : i) * size;
        for (int64_t k = 0; k < size; k += LANES)
            if (rows == LANES && k + LANES <= size) {
                vec x[LANES];
                for (int i = 0; i < LANES; i++) x[i] = load(from[i] + k);
                transpose(x);
                for (int i = 0; i < LANES; i++)
                    if (past) store_past(to + (k + i) * TILE, x[i]);
                    else store(to + (k + i) * TILE, x[i]);
            } else
                for (int64_t i = k; i < least(size, k + LANES); i++)
                    for (int64_t j = 0; j < rows; j++) to[i * TILE + j] = from[j][i];
    }
}

/* The weights of an update, which is complete before a product reads any. */
void pack(int64_t out, int64_t size, const float *weight, float *tiles, int64_t first, int64_t dim) {
    if (sizeof(vec) == 64 && (uintptr_t)tiles % 64 == 0) packed(out, size, weight, tiles, first, dim, 1);
    else packed(out, size, weight, tiles, first, dim, 0);
    all_stored();
}

/* Room for numbers from the beginning of a cache line on: a vector on two of them takes twice as long to load. */
static float *room_for(int64_t numbers) { return aligned_alloc(64, (sizeof(float) * (size_t)numbers + 63) / 64 * 64); }

static float *tiles_for(int64_t out, int64_t size) { return room_for((out + TILE - 1) / TILE * TILE * size); }

/* y [n, out] = x [n, size] @ weight [out, size]^T + bias [out] or NULL */
void project(int64_t n, int64_t size, int64_t out, const float *x, const float *weight, const float *bias, float *y) {
    float *tiles = tiles_for(out, size);
    packed(out, size, weight, tiles, 0, 0, 0);
    linear(n, size, out, x, tiles, bias, 0, y);
    free(tiles);
}

/* grad_x [n, size] = grad [n, out] @ weight [out, size] and grad_weight [out, size] += grad^T @ x [n, size], either NULL
   where it is not wanted; size is a multiple of LANES. */
void project_backward(int64_t n, int64_t size, int64_t out, const float *x, const float *weight, const float *grad,
                      float *grad_x, float *grad_weight) {
    if (grad_x) {
        float *tiles = tiles_for(size, out);
        for (int64_t c = 0; c < size; c += TILE)
            for (int64_t k = 0; k < out; k++)
                memcpy(tiles + c * out + k * TILE, weight + k * size + c, sizeof(float) * (size_t)least(TILE, size - c));
        linear(n, out, size, grad, tiles, 0, 0, grad_x);
        free(tiles);
    }
    if (grad_weight) add_outer(n, size, out, x, grad, grad_weight);
}
