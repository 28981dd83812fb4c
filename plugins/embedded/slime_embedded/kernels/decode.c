/* Tokens -> final hidden states of a dense decoder with a KV cache, in one call; `fused_runner.py` makes the call.

   Rows go through all layers in chunks that stay in the processor's cache. Every number of a row is summed in one order
   whatever is beside it, so a token's result depends on its own sequence only. */

#define CHUNK 96 /* rows that go through all layers together */

/* Vectors x[i] -> one of their sums: groups of 2 * w lanes become groups of w, those of two vectors side by side. */
#define LOWER(o, w, add) ((o) / (w)) % 2 * LANES + (o) / (w) / 2 * 2 * (w) + (o) % (w) + (add)
#define FOLD(w)                                                                                        \
    for (int i = 0; i < w; i++)                                                                        \
        x[i] = __builtin_shuffle(x[i], x[i + w], (ints)EACH(LOWER, w, 0)) + __builtin_shuffle(x[i], x[i + w], (ints)EACH(LOWER, w, w));
INLINE vec sums(vec *x) {
#if LANES == 16
    FOLD(8)
#endif
    FOLD(4) FOLD(2) FOLD(1)
    return x[0];
}

/* y = x / sqrt(mean(x^2) + eps) * weight */
INLINE void rms_norm(int64_t size, const float *x, const float *weight, float eps, float *y) {
    float scale = scale_of(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

/* Pairs (2i, 2i + 1) of each head of x [heads, dim] turned by the angles of rotation [dim], cosine and sine in turns. */
INLINE void rotate(int64_t heads, int64_t dim, const float *rotation, float *x) {
#define EVEN(o, w, add) ((o) & ~1) + (add)
#define OTHER(o, w, add) (o) ^ 1
#define SIGN(o, w, add) ((o) & 1) ? 1.0f : -1.0f
    for (int64_t i = 0; i < dim; i += LANES) {
        vec turn = load(rotation + i), cosine = __builtin_shuffle(turn, (ints)EACH(EVEN, 0, 0));
        vec sine = __builtin_shuffle(turn, (ints)EACH(EVEN, 0, 1)) * (vec)EACH(SIGN, 0, 0);
        for (int64_t h = 0; h < heads; h++) {
            vec v = load(x + h * dim + i);
            store(x + h * dim + i, v * cosine + __builtin_shuffle(v, (ints)EACH(OTHER, 0, 0)) * sine);
        }
    }
}

/* `group` queries q [group, dim] over `seen` keys and values, [.., dim] each -> y [group, dim] */
INLINE void attend_some(int group, int64_t dim, int64_t seen, float scale, const float *q, const float *keys,
                        const float *values, float *scores, float *y) {
    int64_t room = (seen + LANES - 1) / LANES * LANES;
    vec most[4], total[4];
    for (int g = 0; g < group; g++) most[g] = all(-INFINITY);
    for (int64_t s = 0; s < room; s += LANES) {
        vec part[4][LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const float *key = keys + (s + i < seen ? s + i : seen - 1) * dim;
            for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(values + (s + i) * dim + d);
            for (int g = 0; g < group; g++) {
                vec dot = {0};
                for (int64_t d = 0; d < dim; d += LANES) dot += load(q + g * dim + d) * load(key + d);
                part[g][i] = dot;
            }
        }
        for (int g = 0; g < group; g++) {
            vec score = sums(part[g]) * scale;
            store(scores + g * room + s, score);
            most[g] = choose(score > most[g], score, most[g]);
        }
    }
    for (int g = 0; g < group; g++) {
        float top = largest(most[g]);
        total[g] = (vec){0};
        for (int64_t s = 0; s < room; s += LANES) {
            vec p = leading(seen - s, exponential(load(scores + g * room + s) - top), all(0));
            total[g] += p;
            store(scores + g * room + s, p);
        }
    }
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        int two = d + LANES < dim;
        vec out[4][2] = {0};
        for (int64_t s = 0; s < seen; s++) {
            vec one = load(values + s * dim + d), other = load(values + s * dim + d + (two ? LANES : 0));
            for (int g = 0; g < group; g++) {
                out[g][0] += scores[g * room + s] * one;
                out[g][1] += scores[g * room + s] * other;
            }
        }
        for (int g = 0; g < group; g++) {
            float whole = sum(total[g]);
            store(y + g * dim + d, out[g][0] / whole);
            if (two) store(y + g * dim + d + LANES, out[g][1] / whole);
        }
    }
}

INLINE void attend_of(int64_t dim, int64_t heads, int64_t group, int64_t seen, float scale, const float *q,
                      const float *keys, int64_t side, int64_t step, float *scores, float *y) {
    for (int64_t h = 0; h < heads; h++) {
        const float *k = keys + h * step;
        for (int64_t g = 0; g < group;) {
            const float *query = q + (h * group + g) * dim;
            float *out = y + (h * group + g) * dim;
#define SOME(m) attend_some(m, dim, seen, scale, query, k, k + side, scores, out); g += m
            if (group - g >= 4) { SOME(4); } else if (group - g >= 2) { SOME(2); } else { SOME(1); }
        }
    }
}

static void attend(int64_t dim, int64_t heads, int64_t group, int64_t seen, float scale, const float *q,
                   const float *keys, int64_t side, int64_t step, float *scores, float *y) {
#define OF(size) attend_of(size, heads, group, seen, scale, q, keys, side, step, scores, y)
    switch (dim) {  /* known sizes keep a query in registers */
        case 16: OF(16); break;
        case 32: OF(32); break;
        case 64: OF(64); break;
        case 128: OF(128); break;
        default: OF(dim);
    }
}

/* y = silu(gate) * up of both = [gate, up] */
INLINE void swiglu(int64_t size, const float *both, float *y) {
    for (int64_t i = 0; i < size; i += LANES) {
        vec gate = load(both + i);
        store(y + i, gate / (1.0f + exponential(-gate)) * load(both + size + i));
    }
}

/* sizes: layers, hidden, query heads, key heads, head_dim, inner, room for the scores of 4 queries.
   weights: embedding, final norm; of each layer: input norm, qkv, its bias, norms of query and key heads, o, its bias,
   norm, gate and up, their bias, down, its bias; NULL where there is none.
   place [n, 4] of each token: its row of the arena (address of layer 0's keys), numbers from keys to values, from head
   to head, position. Tokens of one sequence are in order, all before them are stored.
   rotations [positions, head_dim]; y [n, hidden]. */
void forward(const int64_t *sizes, const float *const *weights, const int64_t *tokens, const int64_t *place,
             const float *rotations, float *room, float *y, int64_t n, float eps, float scale) {
    int64_t layers = sizes[0], hidden = sizes[1], queries = sizes[2], kv = sizes[3], dim = sizes[4], inner = sizes[5];
    int64_t all_heads = (queries + 2 * kv) * dim, group = queries / kv;
    float *normed = room, *qkv = normed + CHUNK * hidden, *attended = qkv + CHUNK * all_heads;
    float *both = attended + CHUNK * queries * dim, *acts = both + CHUNK * 2 * inner, *scores = acts + CHUNK * inner;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t rows = n - start < CHUNK ? n - start : CHUNK;
        float *x = y + start * hidden;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < hidden; i++) x[r * hidden + i] = weights[0][tokens[start + r] * hidden + i];
        for (int64_t l = 0; l < layers; l++) {
            const float *const *w = weights + 2 + 11 * l;
            for (int64_t r = 0; r < rows; r++) rms_norm(hidden, x + r * hidden, w[0], eps, normed + r * hidden);
            linear(rows, hidden, all_heads, normed, w[1], w[2], 0, qkv);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t *at = place + 4 * (start + r);
                float *q = qkv + r * all_heads, *keys = (float *)at[0] + 2 * l * at[1];
                if (w[3])
                    for (int64_t h = 0; h < queries + kv; h++) rms_norm(dim, q + h * dim, w[3] + h * dim, eps, q + h * dim);
                rotate(queries + kv, dim, rotations + at[3] * dim, q);
                for (int64_t h = 0; h < 2 * kv; h++) {
                    float *to = keys + (h < kv ? 0 : at[1]) + h % kv * at[2] + at[3] * dim;
                    for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(q + (queries + h) * dim + d));
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                const int64_t *at = place + 4 * (start + r);
                attend(dim, kv, group, at[3] + 1, scale, qkv + r * all_heads, (float *)at[0] + 2 * l * at[1], at[1], at[2],
                       scores, attended + r * queries * dim);
            }
            linear(rows, queries * dim, hidden, attended, w[4], w[5], 1, x);
            for (int64_t r = 0; r < rows; r++) rms_norm(hidden, x + r * hidden, w[6], eps, normed + r * hidden);
            linear(rows, hidden, 2 * inner, normed, w[7], w[8], 0, both);
            for (int64_t r = 0; r < rows; r++) swiglu(inner, both + r * 2 * inner, acts + r * inner);
            linear(rows, inner, hidden, acts, w[9], w[10], 1, x);
        }
        for (int64_t r = 0; r < rows; r++) rms_norm(hidden, x + r * hidden, weights[1], eps, x + r * hidden);
    }
}
