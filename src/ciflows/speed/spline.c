/* Monotonic rational-quadratic splines and their gradients: see `spline` in layers/splines.py.

   Each number passes a spline of its own, given by the logarithms of its pieces' widths and heights, and
   of the slopes between them, all bounded softly. Letters as Durkan et al. (2019) have them: within a
   piece of width w and height h, t is the place from 0 to 1, s = h / w, d and e are the slopes at its
   ends,

       y = y0 + h (s t² + d r) / D,   D = s + (d + e - 2 s) r,   r = t (1 - t)
       dy/dx = s² P / D²,             P = 2 s r + d (1 - t)² + e t² */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Loops over pieces take them eight at a time, which compilers make vectors of. */
enum { MOST_BINS = 64, EIGHT = 8 };

typedef struct {
    long rows;
    int bins, parts;         /* rows are shared among so many threads */
    long along[3];           /* from a row of widths, heights, slopes to the next */
    float bound, log_ratio;  /* splines act on [-bound, bound]; the logarithm of the largest slope */
    const float *x, *numbers[3]; /* x is y for the inverse */
} Spline;

/* One direction of a spline, widths or heights. */
typedef struct {
    float share[MOST_BINS]; /* of each piece, in all */
    float slope[MOST_BINS]; /* of the bounded numbers by the numbers */
    float start, size;      /* of the piece at hand */
} Side;

/* exp(x) = 2^n exp(r) with |r| <= log(2) / 2, for x whose power is an ordinary number; NaN stays. */
static inline float power_of_e(float x) {
    const float round = 0x1.8p23f; /* what is added to it ends as an integer in the low bits */
    union { float number; uint32_t bits; } n = {x * 1.44269504f + round}, power;
    float whole = n.number - round;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* log(2) in two parts */
    float tail = 0.49999994f + r * (0.1666652f + r * (0.04166839f + r * (0.00836878f + r * 0.00138145f)));
    power.bits = (n.bits << 23) + (127u << 23);
    return power.number * (1 + r + r * r * tail);
}

/* A number is bounded by a factor; the square of it is the slope of this. */
static inline float factor(float number, float limit) { return 1 / (1 + fabsf(number) / limit); }

static inline void fill(Side *side, const float *numbers, int bins, float limit) {
    float padded[MOST_BINS] = {0}, total = 0;
    memcpy(padded, numbers, bins * sizeof(float));
    for (int i = 0; i < bins; i += EIGHT)
        for (int j = i; j < i + EIGHT; j++) {
            float part = factor(padded[j], limit);
            side->share[j] = power_of_e(padded[j] * part);
            side->slope[j] = part * part;
        }
    for (int i = 0; i < bins; i++)
        total += side->share[i];
    total = 1 / total;
    for (int i = 0; i < bins; i += EIGHT)
        for (int j = i; j < i + EIGHT; j++)
            side->share[j] *= total;
}

static inline void place(Side *side, int piece, float bound) {
    float below = 0;
    for (int i = 0; i < piece; i++)
        below += side->share[i];
    side->start = bound * (2 * below - 1);
    side->size = 2 * bound * side->share[piece];
}

/* The piece that x lies in; -1 outside of all, and for NaN. */
static inline int find(const Side *side, float x, int bins, float bound) {
    if (!(x > -bound && x <= bound))
        return -1;
    float edge = 0;
    int piece = 0;
    for (int i = 0; i < bins - 1; i++) {
        edge += side->share[i];
        piece += bound * (2 * edge - 1) < x;
    }
    return piece;
}

static inline float slope_at(const Spline *spline, const float *slopes, int knot) {
    if (knot == 0 || knot == spline->bins)
        return 1;
    float number = slopes[knot - 1];
    return power_of_e(number * factor(number, spline->log_ratio));
}

/* Gradients by the numbers of one side, from those by the start and size of the piece at hand. */
static inline void fill_backward(const Side *side, float *by, int bins, int piece, float by_start,
                                 float by_size, float bound) {
    float padded[MOST_BINS], mean = by_start * (side->start + bound) + by_size * side->size;
    for (int i = 0; i < bins; i += EIGHT)
        for (int j = i; j < i + EIGHT; j++) {
            float by_share = 2 * bound * (j < piece ? by_start : j == piece ? by_size : 0);
            padded[j] = side->share[j] * (by_share - mean) * side->slope[j];
        }
    memcpy(by, padded, bins * sizeof(float));
}

static void forward_part(const Spline *spline, long from, long to, float *y, float *log_slope) {
    float limit = spline->log_ratio / 2;
    for (long row = from; row < to; row++) {
        const float *numbers[3];
        for (int i = 0; i < 3; i++)
            numbers[i] = spline->numbers[i] + row * spline->along[i];
        float x = spline->x[row];
        Side across, up;
        fill(&across, numbers[0], spline->bins, limit);
        int piece = find(&across, x, spline->bins, spline->bound);
        if (piece < 0) {
            y[row] = x;
            log_slope[row] = x != x ? x : 0;
            continue;
        }
        fill(&up, numbers[1], spline->bins, limit);
        place(&across, piece, spline->bound);
        place(&up, piece, spline->bound);
        float d = slope_at(spline, numbers[2], piece), e = slope_at(spline, numbers[2], piece + 1);
        float s = up.size / across.size, t = (x - across.start) / across.size, r = t * (1 - t);
        float D = s + (d + e - 2 * s) * r, P = 2 * s * r + d * (1 - t) * (1 - t) + e * t * t;
        y[row] = up.start + up.size * (s * t * t + d * r) / D;
        log_slope[row] = logf(s * s * P / (D * D));
    }
}

/* The other way: x of y, and the slope dy/dx there. Roots of steep pieces need double precision. */
static void inverse_part(const Spline *spline, long from, long to, float *x, float *slope) {
    float limit = spline->log_ratio / 2;
    for (long row = from; row < to; row++) {
        const float *numbers[3];
        for (int i = 0; i < 3; i++)
            numbers[i] = spline->numbers[i] + row * spline->along[i];
        float y = spline->x[row];
        Side across, up;
        fill(&up, numbers[1], spline->bins, limit);
        int piece = find(&up, y, spline->bins, spline->bound);
        if (piece < 0) {
            x[row] = y;
            slope[row] = y != y ? y : 1;
            continue;
        }
        fill(&across, numbers[0], spline->bins, limit);
        place(&across, piece, spline->bound);
        place(&up, piece, spline->bound);
        double d = slope_at(spline, numbers[2], piece), e = slope_at(spline, numbers[2], piece + 1);
        double h = up.size, s = h / across.size, above = (double)y - up.start, q = above * (d + e - 2 * s);
        double a = h * (s - d) + q, b = h * d - q, c = -s * above, square = b * b - 4 * a * c;
        double t = 2 * c / (-b - sqrt(square > 0 ? square : 0)), r = t * (1 - t);
        double D = s + (d + e - 2 * s) * r, P = 2 * s * r + d * (1 - t) * (1 - t) + e * t * t;
        x[row] = across.start + across.size * t;
        slope[row] = s * s * P / (D * D);
    }
}

static void backward_part(const Spline *spline, long from, long to, const float *by_y, const float *by_log,
                          float *by_x, float *const *by_numbers) {
    int bins = spline->bins;
    float limit = spline->log_ratio / 2, bound = spline->bound;
    for (long row = from; row < to; row++) {
        const float *numbers[3];
        float *by[3];
        for (int i = 0; i < 3; i++) {
            numbers[i] = spline->numbers[i] + row * spline->along[i];
            by[i] = by_numbers[i] + row * (bins - (i == 2));
        }
        float x = spline->x[row], gy = by_y[row], gl = by_log[row];
        Side across, up;
        fill(&across, numbers[0], bins, limit);
        int piece = find(&across, x, bins, bound);
        for (int i = 0; i < bins - 1; i++)
            by[2][i] = 0;
        if (piece < 0) {
            by_x[row] = gy;
            for (int i = 0; i < bins; i++)
                by[0][i] = by[1][i] = 0;
            continue;
        }
        fill(&up, numbers[1], bins, limit);
        place(&across, piece, bound);
        place(&up, piece, bound);
        float d = slope_at(spline, numbers[2], piece), e = slope_at(spline, numbers[2], piece + 1);
        float w = across.size, h = up.size, s = h / w, t = (x - across.start) / w, r = t * (1 - t);
        float D = s + (d + e - 2 * s) * r, N = s * t * t + d * r;
        float P = 2 * s * r + d * (1 - t) * (1 - t) + e * t * t, hD = h / (D * D);
        float log_t = (2 * s * (1 - 2 * t) - 2 * d * (1 - t) + 2 * e * t) / P
                      - 2 * (d + e - 2 * s) * (1 - 2 * t) / D;
        float by_t = gy * hD * s * P + gl * log_t;
        float by_s = gy * hD * (t * t * D - N * (1 - 2 * r)) + gl * (2 / s - 2 * (1 - 2 * r) / D + 2 * r / P);
        float by_d = gy * hD * r * (D - N) + gl * ((1 - t) * (1 - t) / P - 2 * r / D);
        float by_e = -gy * hD * r * N + gl * (t * t / P - 2 * r / D);
        by_x[row] = by_t / w;
        fill_backward(&across, by[0], bins, piece, -by_t / w, -(by_t * t + by_s * s) / w, bound);
        fill_backward(&up, by[1], bins, piece, gy, gy * N / D + by_s / w, bound);
        if (piece > 0) {
            float part = factor(numbers[2][piece - 1], spline->log_ratio);
            by[2][piece - 1] = by_d * d * part * part;
        }
        if (piece < bins - 1) {
            float part = factor(numbers[2][piece], spline->log_ratio);
            by[2][piece] = by_e * e * part * part;
        }
    }
}

void spline_forward(const Spline *spline, float *y, float *log_slope) {
#pragma omp parallel for num_threads(spline->parts)
    for (int i = 0; i < spline->parts; i++)
        forward_part(spline, spline->rows * i / spline->parts, spline->rows * (i + 1) / spline->parts, y,
                     log_slope);
}

void spline_inverse(const Spline *spline, float *x, float *slope) {
#pragma omp parallel for num_threads(spline->parts)
    for (int i = 0; i < spline->parts; i++)
        inverse_part(spline, spline->rows * i / spline->parts, spline->rows * (i + 1) / spline->parts, x,
                     slope);
}

void spline_backward(const Spline *spline, const float *by_y, const float *by_log, float *by_x,
                     float *by_widths, float *by_heights, float *by_slopes) {
    float *by_numbers[3] = {by_widths, by_heights, by_slopes};
#pragma omp parallel for num_threads(spline->parts)
    for (int i = 0; i < spline->parts; i++)
        backward_part(spline, spline->rows * i / spline->parts, spline->rows * (i + 1) / spline->parts, by_y,
                      by_log, by_x, by_numbers);
}
