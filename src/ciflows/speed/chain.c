/* Chains of activations and linear maps, with tangents: see `plain_chain` in cpu_chain.py.

   A few points at a time go through the whole chain, while all that belongs to them stays in the caches
   of a core. Such a tile is a matrix: first the rows of the points' values, then those of each tangent. So
   a layer is one product, and memory sees only what is saved of it for the backward pass.

   Rows of tiles and of packed weights are padded to whole vectors. The padding of a tile may hold
   anything: products make more padding of it, and nothing else reads it. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The sums of a product's block, BLOCK rows of two vectors, have to leave some registers free. */
#if defined __AVX512F__
enum { LANES = 16, BLOCK = 8 };
#elif defined __AVX__
enum { LANES = 8, BLOCK = 6 };
#elif defined __aarch64__
enum { LANES = 4, BLOCK = 8 };
#else
enum { LANES = 4, BLOCK = 6 };
#endif

/* Rows of a tile, about: its matrices fit the second cache, a block's columns of one fit the first. */
enum { TILE = 96 };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

enum { IDENTITY, SILU, TANH, RELU };

typedef struct {
    long rows; /* the stack is (1 + tangents, rows, widths[0]) */
    int parts; /* in which rows are shared among threads */
    int tangents, layers;
    const int *activations;      /* before the map of each layer */
    const int *widths;           /* layers + 1 of them */
    const float *const *weights; /* V of each layer, (widths[i + 1], widths[i]) */
    const float *const *biases;  /* c of each layer */
} Chain;

typedef struct {
    float *at;
    long down, along; /* from a row, and from a column, to the next */
} Matrix;

typedef struct {
    const Chain *chain;
    long start, points;                           /* the tile at hand is of these rows of the stack */
    float *input, *first, *active, *grad, *other; /* tiles */
    float *slope, *bend;                          /* a' and a'' of a tile's values */
    int is_backward;                              /* whether these are needed again */
    float *forward, *backward, *gradients;        /* one for each layer: packed weights, and gradients */
    long size;                                    /* of each of these */
} Work;

static long least(long one, long other) { return one < other ? one : other; }

static long most(long one, long other) { return one > other ? one : other; }

/* An odd number of vectors: rows that are a power of two apart would share few places of a cache. */
static long stride(long width) { return ((width + LANES - 1) / LANES | 1) * LANES; }

static Matrix rows_of(const float *at, long width) { return (Matrix){(float *)at, stride(width), 1}; }

static Matrix turned(Matrix matrix) { return (Matrix){matrix.at, matrix.along, matrix.down}; }

static void copy(Matrix to, Matrix from, long rows, long columns) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++)
            to.at[i * to.down + j * to.along] = from.at[i * from.down + j * from.along];
}

/* C = A B, or C += A B, for a few rows and one or two vectors of C, which stay in registers meanwhile:
   this is inlined where both numbers are known. */
static inline __attribute__((always_inline)) void
block(int rows, int vectors, Matrix c, Matrix a, Matrix b, long depth, int add) {
    vec sums[BLOCK][2] = {0};
    for (long k = 0; k < depth; k++, a.at += a.along, b.at += b.down)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++)
                sums[i][j] += a.at[i * a.down] * *(vec *)(b.at + j * LANES);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            vec *to = (vec *)(c.at + i * c.down + j * LANES);
            if (add)
                sums[i][j] += *to; /* only now: sums of sums are more precise */
            *to = sums[i][j];
        }
}

static inline __attribute__((always_inline)) void
blocks(int vectors, Matrix c, Matrix a, Matrix b, long rows, long depth, int add) {
    for (long some; rows > 0; rows -= some, c.at += some * c.down, a.at += some * a.down) {
        some = rows >= BLOCK ? BLOCK : rows >= 4 ? 4 : 1;
        if (some == BLOCK)
            block(BLOCK, vectors, c, a, b, depth, add);
        else if (some == 4)
            block(4, vectors, c, a, b, depth, add);
        else
            block(1, vectors, c, a, b, depth, add);
    }
}

/* C = A B, or C += A B, of (rows, depth) and (depth, columns). Rows of B and of C are padded. */
static void product(Matrix c, Matrix a, Matrix b, long rows, long columns, long depth, int add) {
    for (; columns > LANES; columns -= 2 * LANES, b.at += 2 * LANES, c.at += 2 * LANES)
        blocks(2, c, a, b, rows, depth, add);
    if (columns > 0)
        blocks(1, c, a, b, rows, depth, add);
}

/* s = 1 / (1 + exp(-y)) by exp(x) = 2^n exp(r) with |r| <= log(2) / 2; it is 0 where 2^n is infinite. */
static inline float sigmoid(float y) {
    const float round = 0x1.8p23f;                /* what is added to it ends as an integer in the low bits */
    float x = -y > 89 ? 89 : -y < -87 ? -87 : -y; /* NaN stays */
    union { float number; uint32_t bits; } n = {x * 1.44269504f + round}, power;
    float whole = n.number - round;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* log(2) in two parts */
    float tail = 0.49999994f + r * (0.1666652f + r * (0.04166839f + r * (0.00836878f + r * 0.00138145f)));
    power.bits = (n.bits << 23) + (127u << 23);
    return 1 / (1 + power.number * (1 + r + r * r * tail));
}

/* An activation a(y) with a' and a''. */
typedef struct { float value, slope, bend; } Active;

static inline __attribute__((always_inline)) Active activated(int activation, float y) {
    if (activation == SILU) {
        float s = sigmoid(y), a = y * s;
        return (Active){a, s + a * (1 - s), (1 - s) * (2 * s + a * (1 - 2 * s))};
    }
    if (activation == TANH) {
        float a = 2 * sigmoid(2 * y) - 1, slope = 1 - a * a;
        return (Active){a, slope, -2 * a * slope};
    }
    if (activation == RELU)
        return (Active){y < 0 ? 0 : y, y > 0, 0}; /* NaN stays */
    return (Active){y, 1, 0};
}

/* Make (a, a' T) of (y, T). This is inlined where the activation is known. */
static inline __attribute__((always_inline)) void
activate_as(int activation, const Work *work, const float *input, long width) {
    long down = stride(width), plane = work->points * down;
    for (long at = 0; at < plane; at += down) {
        long here = work->is_backward ? at : 0; /* else one row of slopes serves all */
        float *restrict active = work->active + at;
        float *restrict slope = work->slope + here, *restrict bend = work->bend + here;
        for (long i = 0; i < width; i++) {
            Active a = activated(activation, input[at + i]);
            active[i] = a.value;
            slope[i] = a.slope;
            bend[i] = a.bend;
        }
        for (long j = 1; j <= work->chain->tangents; j++)
            for (long i = 0; i < width; i++)
                active[j * plane + i] = slope[i] * input[j * plane + at + i];
    }
}

/* Activate a layer's inputs. */
static void activate(const Work *work, int index, const float *input) {
    long width = work->chain->widths[index];
    switch (work->chain->activations[index]) {
    case SILU: activate_as(SILU, work, input, width); break;
    case TANH: activate_as(TANH, work, input, width); break;
    case RELU: activate_as(RELU, work, input, width); break;
    default: activate_as(IDENTITY, work, input, width);
    }
}

/* Turn the gradient by (a, a' T) into the one by (y, T). */
static void deactivate(const Work *work, float *grad, const float *input, long width) {
    long down = stride(width), plane = work->points * down;
    for (long at = 0; at < plane; at += down) {
        const float *restrict slope = work->slope + at, *restrict bend = work->bend + at;
        float *restrict by_value = grad + at;
        for (long i = 0; i < width; i++)
            by_value[i] *= slope[i];
        for (long j = 1; j <= work->chain->tangents; j++) {
            const float *restrict tangent = input + j * plane + at;
            float *restrict by_tangent = grad + j * plane + at;
            for (long i = 0; i < width; i++) {
                by_value[i] += by_tangent[i] * tangent[i] * bend[i];
                by_tangent[i] *= slope[i];
            }
        }
    }
}

/* (y, T) <- (V a(y) + c, V (a'(y) T)), from one tile to another or in place. */
static void layer(const Work *work, int index, const float *input, float *result) {
    const Chain *chain = work->chain;
    long in = chain->widths[index], out = chain->widths[index + 1];
    activate(work, index, input);
    product(rows_of(result, out), rows_of(work->active, in), rows_of(work->forward + index * work->size, out),
            (1 + chain->tangents) * work->points, out, in, 0);
    for (long i = 0; i < work->points; i++)
        for (long j = 0; j < out; j++)
            result[i * stride(out) + j] += chain->biases[index][j];
}

/* From the gradient of a layer's outputs to that of its inputs, before activation. */
static void layer_backward(Work *work, int index, const float *input) {
    const Chain *chain = work->chain;
    long in = chain->widths[index], out = chain->widths[index + 1];
    float *result = work->other;
    product(rows_of(result, in), rows_of(work->grad, out), rows_of(work->backward + index * work->size, in),
            (1 + chain->tangents) * work->points, in, out, 0);
    deactivate(work, result, input, in);
    work->other = work->grad;
    work->grad = result;
}

/* Add to the gradient by V, which is turned, (in, out), and to the one by c, which is the row below. */
static void add_gradients(const Work *work, int index) {
    const Chain *chain = work->chain;
    long in = chain->widths[index], out = chain->widths[index + 1];
    Matrix active = rows_of(work->active, in), grad = rows_of(work->grad, out);
    Matrix sum = rows_of(work->gradients + index * work->size, out);
    float one = 1;
    product(sum, turned(active), grad, in, out, (1 + chain->tangents) * work->points, 1);
    sum.at += in * sum.down;
    product(sum, (Matrix){&one, 0, 0}, grad, 1, out, work->points, 1);
}

/* V as the right side of a product in the forward pass, (in, out), or in the backward pass, (out, in). */
static void pack(const Work *work, int index, int is_forward) {
    long in = work->chain->widths[index], out = work->chain->widths[index + 1];
    float *at = (is_forward ? work->forward : work->backward) + index * work->size;
    Matrix weight = {(float *)work->chain->weights[index], in, 1};
    memset(at, 0, work->size * sizeof(float));
    copy(is_forward ? turned(rows_of(at, out)) : rows_of(at, in), weight, out, in);
}

enum { IN, OUT };

/* Move the tile at hand between its own place and a stack. */
static void move(const Work *work, float *tile, const float *stack, long width, int where) {
    for (long j = 0; j <= work->chain->tangents; j++) {
        Matrix inside = rows_of(tile + j * work->points * stride(width), width);
        Matrix outside = {(float *)stack + (j * work->chain->rows + work->start) * width, width, 1};
        copy(where == IN ? inside : outside, where == IN ? outside : inside, work->points, width);
    }
}

/* Where a tile's inputs of a layer are saved: tile after tile, and in each of them layer after layer.
   Those of the first two are not: it is faster to compute them again. */
static long saved_at(const Chain *chain, int index, long start, long points) {
    long before = 0, all = 0;
    for (int i = 2; i < chain->layers; i++) {
        before += i < index ? stride(chain->widths[i]) : 0;
        all += stride(chain->widths[i]);
    }
    return (1 + chain->tangents) * (start * all + points * before);
}

static long tile_points(const Chain *chain) {
    long points = TILE / (1 + chain->tangents);
    return points > 4 ? points - points % 4 : most(points, 1); /* rows beside whole blocks are slow */
}

static long widest(const Chain *chain) {
    long width = 0;
    for (int i = 0; i <= chain->layers; i++)
        width = most(width, chain->widths[i]);
    return width;
}

enum { TILES = 7 };

static long tile_size(const Chain *chain) {
    return (1 + chain->tangents) * tile_points(chain) * stride(widest(chain));
}

/* Of a packed weight, or of its gradient with the row for that by c. */
static long map_size(const Chain *chain) { return (widest(chain) + 1) * stride(widest(chain)); }

static long part_size(const Chain *chain) {
    return TILES * tile_size(chain) + chain->layers * map_size(chain);
}

/* How many floats a call works in: packed weights, which parts share, and what each has of its own. */
long chain_memory(const Chain *chain) {
    return 2 * chain->layers * map_size(chain) + chain->parts * part_size(chain);
}

/* How many floats are saved for the backward pass. */
long chain_saved(const Chain *chain) { return saved_at(chain, 0, chain->rows, 0); }

/* One of the parts of a call: rows from `start` on, and memory of its own. */
static Work begin(const Chain *chain, float *memory, int part, int is_backward) {
    long tile = tile_size(chain), size = map_size(chain), layers = chain->layers * size;
    float *own = memory + 2 * layers + part * part_size(chain);
    return (Work){
        .chain = chain, .size = size, .start = chain->rows * part / chain->parts, .is_backward = is_backward,
        .input = own, .first = own + tile, .active = own + 2 * tile, .grad = own + 3 * tile,
        .other = own + 4 * tile, .slope = own + 5 * tile, .bend = own + 6 * tile,
        .gradients = own + TILES * tile, .forward = memory, .backward = memory + layers,
    };
}

static long end_of(const Chain *chain, int part) { return chain->rows * (part + 1) / chain->parts; }

static void part_forward(Work work, long stop, const float *stack, float *result, float *saved) {
    const Chain *chain = work.chain;
    for (; work.start < stop; work.start += work.points) {
        work.points = least(tile_points(chain), stop - work.start);
        float *input = work.input;
        move(&work, input, stack, chain->widths[0], IN);
        for (int i = 0; i < chain->layers; i++) {
            int is_saved = saved && i > 0 && i + 1 < chain->layers;
            float *out = is_saved ? saved + saved_at(chain, i + 1, work.start, work.points) : work.first;
            layer(&work, i, input, out);
            input = out;
        }
        move(&work, input, result, chain->widths[chain->layers], OUT);
    }
}

static void part_backward(Work work, long stop, const float *stack, const float *saved, const float *grad,
                          float *by_stack, int by_maps) {
    const Chain *chain = work.chain;
    if (by_maps)
        memset(work.gradients, 0, chain->layers * work.size * sizeof(float));
    for (; work.start < stop; work.start += work.points) {
        work.points = least(tile_points(chain), stop - work.start);
        move(&work, work.input, stack, chain->widths[0], IN);
        move(&work, work.grad, grad, chain->widths[chain->layers], IN);
        layer(&work, 0, work.input, work.first);
        for (int i = chain->layers - 1; i >= 0; i--) {
            const float *input = i > 1 ? saved + saved_at(chain, i, work.start, work.points)
                                       : i > 0 ? work.first : work.input;
            activate(&work, i, input);
            if (by_maps)
                add_gradients(&work, i);
            if (i > 0 || by_stack)
                layer_backward(&work, i, input);
        }
        if (by_stack)
            move(&work, work.grad, by_stack, chain->widths[0], OUT);
    }
}

/* The chain of a stack. What the backward pass needs is saved unless `saved` is null. */
void chain_forward(const Chain *chain, const float *stack, float *result, float *saved, float *memory) {
    Work whole = begin(chain, memory, 0, 0);
    for (int i = 0; i < chain->layers; i++)
        pack(&whole, i, 1);
#pragma omp parallel for num_threads(chain->parts)
    for (int i = 0; i < chain->parts; i++)
        part_forward(begin(chain, memory, i, 0), end_of(chain, i), stack, result, saved);
}

/* Gradients by the stack, and by all V, then all c, unless they are null.
   As many parts as in the forward pass. */
void chain_backward(const Chain *chain, const float *stack, const float *saved, const float *grad,
                    float *by_stack, float *by_maps, float *memory) {
    Work whole = begin(chain, memory, 0, 1);
    pack(&whole, 0, 1);
    for (int i = 0; i < chain->layers; i++)
        pack(&whole, i, 0);
#pragma omp parallel for num_threads(chain->parts)
    for (int i = 0; i < chain->parts; i++)
        part_backward(begin(chain, memory, i, 1), end_of(chain, i), stack, saved, grad, by_stack,
                      by_maps != NULL);
    if (!by_maps)
        return;
    for (int i = 1; i < chain->parts; i++) {
        const float *other = begin(chain, memory, i, 1).gradients;
        for (long j = 0; j < chain->layers * whole.size; j++)
            whole.gradients[j] += other[j];
    }
    float *by_biases = by_maps;
    for (int i = 0; i < chain->layers; i++)
        by_biases += chain->widths[i] * chain->widths[i + 1];
    for (int i = 0; i < chain->layers; i++) {
        long in = chain->widths[i], out = chain->widths[i + 1];
        Matrix sum = rows_of(whole.gradients + i * whole.size, out);
        copy((Matrix){by_maps, in, 1}, turned(sum), out, in);
        memcpy(by_biases, sum.at + in * sum.down, out * sizeof(float));
        by_maps += in * out;
        by_biases += out;
    }
}
