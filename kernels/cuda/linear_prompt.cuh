// Tiles of the prompt form: 128 outputs by TILE_ROWS (128 or 64) rows of a grouped matrix, through a pipeline
// of steps in shared memory. Four warps along outputs (32 each) by ROW_WARPS (1 or 2) along rows: warp w of
// these takes the row tiles w, w + ROW_WARPS, ... of 8 rows, so that missing rows cost little. Group sums
// stay in tensor-core accumulators; each is scaled as in the decode form, groups ascending; a finished slice
// is added to what `out` holds of the slices before it, by the thread that wrote it. Shared by
// linear_prompt.cu and experts_prompt.cu.
#pragma once
#include "linear.cuh"

#define STAGES 4
#define TILE_OUTPUTS 128
#define TILE_THREADS (128 * ROW_WARPS)

template <class S>
struct TileShape {
    static const int ROWS = TILE_ROWS;
    static const int ROW_TILES = ROWS / (8 * ROW_WARPS);  // of 8 rows, a warp
    static const int STEP_GROUPS = S::GROUP == 32 ? 2 : 1;
    static const int ROW_BYTES = ROWS * 2 * STEP;
    static const int CODE_BYTES = 8 * S::STEP_WORDS * 4;
    static const int PARAM_BYTES = 8 * STEP_GROUPS * S::GROUP_BYTES;
    static const int UNIT_BYTES = STEP_GROUPS * ROWS * 8;
    static const int STAGE_BYTES = ROW_BYTES + CODE_BYTES + PARAM_BYTES + UNIT_BYTES;
    static const int BYTES = STAGES * STAGE_BYTES;
};

// What a tile multiplies: `count` rows of codes (row n is `index[n] / divisor`, or first + n), `cols` inputs.
struct TileRows {
    const uchar* codes;
    const float* units;
    const float* sums;
    const uint* index;
    uint divisor, first, count, cols;
    SHARED uint row(uint n) const { return index ? index[n] / divisor : first + n; }
};

// Is a row of the tile marked? All threads of the block.
SHARED bool any_marked(const uint* marks, const TileRows& in) {
    __shared__ uint any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (threadIdx.x < in.count && marks[in.row(threadIdx.x)] != 0) any = 1;
    __syncthreads();
    return any != 0;
}

// Is one of the first `count` marks set? All threads of the block.
SHARED bool any_marked(const uint* marks, uint count) {
    __shared__ uint any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    uint own = 0;
#pragma unroll 8
    for (uint i = threadIdx.x; i < count; i += blockDim.x) own |= marks[i];
    if (own != 0) any = 1;
    __syncthreads();
    return any != 0;
}

// 16 bytes, or zeros.
SHARED void copy_async_16_or_zeros(void* to, const void* from, bool there) {
    uint at = (uint)__cvta_generic_to_shared(to), bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}

// What a thread copies at every step, as places that move along: chunks of 16 bytes of row codes (thread t:
// chunk t % 8 of rows t / 8, t / 8 + TILE_THREADS / 8, ...; odd rows swap halves, against bank conflicts), of
// weight codes and scales, and single units.
template <class S>
struct Fetch {
    typedef TileShape<S> T;
    static const int ROW_COPIES = T::ROWS * 8 / TILE_THREADS;
    static const uint CODE_CHUNKS = 8 * S::BITS, PARAM_CHUNKS = T::STEP_GROUPS * S::GROUP_BYTES / 16;
    static const int CODE_COPIES = (8 * CODE_CHUNKS + TILE_THREADS - 1) / TILE_THREADS;

    const uchar* rows;
    const uchar* codes[CODE_COPIES];
    const uchar* params;
    const float* units;
    uint row_of[ROW_COPIES], row_bytes, left;

    SHARED Fetch(const Packed& m, const TileRows& in, uint tile, uint tiles) {
        uint t = threadIdx.x, steps = (in.cols + STEP - 1) / STEP, groups = in.cols / S::GROUP;
        rows = in.codes + t % 8 * 16;
        row_bytes = in.cols * 2;
        left = in.cols / 32;
#pragma unroll
        for (int j = 0; j < ROW_COPIES; j++)
            row_of[j] = in.row(min(t / 8 + TILE_THREADS / 8 * j, in.count - 1));
#pragma unroll
        for (int j = 0; j < CODE_COPIES; j++) {
            uint i = t + j * TILE_THREADS, own = min(tile + i / CODE_CHUNKS, tiles - 1);
            codes[j] = (const uchar*)(m.codes + (ulong)own * steps * S::STEP_WORDS) + i % CODE_CHUNKS * 16;
        }
        uint own = min(tile + t / PARAM_CHUNKS, tiles - 1);
        params = m.params + (ulong)own * groups * S::GROUP_BYTES + t % PARAM_CHUNKS * 16;
        units =
            (t / T::ROWS % 2 ? in.sums : in.units) + (ulong)in.row(min(t % T::ROWS, in.count - 1)) * groups;
    }

    // Copies of the step it stands at into a stage, in PARTS parts to be put between other work: many copies
    // at once would keep reads of shared memory waiting behind them. Rows that are not there become zeros.
    // The last part moves on to the next step.
    static const int PARTS = T::ROW_TILES / 2;

    SHARED void part(int at, uchar* stage, uint count, uint step) {
        uint t = threadIdx.x, chunk = t % 8;
        bool in_row = S::GROUP != 32 || chunk < 4 || left > 1;
#pragma unroll
        for (int j = 0; j < ROW_COPIES; j++) {
            if (j * PARTS / ROW_COPIES != at) continue;
            uint row = t / 8 + TILE_THREADS / 8 * j;
            bool there = row < count && in_row;
            const uchar* from = rows + (ulong)row_of[j] * row_bytes;
            if (S::GROUP == 32 && !in_row) from -= 64;
            copy_async_16_or_zeros(stage + row * 128 + (chunk ^ (row & 1) << 2) * 16, from, there);
        }
        stage += T::ROW_BYTES;
#pragma unroll
        for (int j = 0; j < CODE_COPIES; j++) {
            if (j * PARTS / CODE_COPIES != at) continue;
            uint i = t + j * TILE_THREADS;
            if (8 * CODE_CHUNKS % TILE_THREADS == 0 || i < 8 * CODE_CHUNKS)
                copy_async_16(stage + i * 16, codes[j]);
            codes[j] += S::STEP_WORDS * 4;
        }
        if (at != PARTS - 1) return;
        rows += 2 * STEP;
        stage += T::CODE_BYTES;
        // Of a last half step the second group is not there.
        if (t < 8 * PARAM_CHUNKS && (S::GROUP != 32 || left > 1 || t % PARAM_CHUNKS < PARAM_CHUNKS / 2))
            copy_async_16(stage + t * 16, params);
        float* to = (float*)(stage + T::PARAM_BYTES);
#pragma unroll
        for (int group = 0; group < T::STEP_GROUPS; group++)
            if (t < 2 * T::ROWS && (S::GROUP != 32 || group == 0 || left > 1))
                copy_async_4(to + group * 2 * T::ROWS + t, units + group);
        if (S::GROUP != 128 || step % 2 == 1) {
            params += T::STEP_GROUPS * S::GROUP_BYTES;
            units += T::STEP_GROUPS;
        }
        left -= 2;
    }

    SHARED void all(uchar* stage, uint count, uint step) {
#pragma unroll
        for (int at = 0; at < PARTS; at++) part(at, stage, count, step);
    }
};

template <class S>
struct TileSums {
    float v[TileShape<S>::ROW_TILES][2][4];
};

// Adds a group's exact sums of one row tile to its slice sums. `units` of the group: [unit, sum][row].
template <class S>
SHARED void scale_tile(float acc[2][4], const float low[2][4], const float high[2][4], const float* units,
                       uint row, const Scales s[2]) {
    typedef TileShape<S> T;
    float2 unit = *(const float2*)(units + row), sum = *(const float2*)(units + T::ROWS + row);
    typename UnitOf<S::WIDE>::Type u[2];
    make_unit(unit.x, sum.x, u[0]);
    make_unit(unit.y, sum.y, u[1]);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[m][i] = scale_group<S>(acc[m][i], low[m][i], high[m][i], u[i % 2], s[m].scale[i / 2],
                                       s[m].bias[i / 2]);
}

template <class S>
struct Fragments {
    uint low[2][4], high[S::WIDE ? 2 : 1][4];
};

template <class S, int T>
SHARED void make_fragments(Fragments<S>& f, const StepWords<S>& words) {
    fragment<S, T, 0, false>(f.low[0], words);
    fragment<S, T, 1, false>(f.low[1], words);
    if constexpr (S::WIDE) {
        fragment<S, T, 0, true>(f.high[0], words);
        fragment<S, T, 1, true>(f.high[1], words);
    }
}

template <class S>
SHARED void multiply_fragments(float low[4], float high[4], const Fragments<S>& f, uint4 b) {
    mma(low, f.low[0], b.x, b.y);
    mma(low, f.low[1], b.z, b.w);
    if constexpr (S::WIDE) {
        mma(high, f.high[0], b.x, b.y);
        mma(high, f.high[1], b.z, b.w);
    }
}

SHARED void clear(float v[2][4]) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[m][i] = 0.0f;
}

// One step of the pipeline. `exact`: sums that live across steps, for groups of 128. FULL: all rows are
// there, so that row tiles may overlap in time. `between(i)` is called after the i-th pair of row tiles, if
// that is worked on.
template <class S, bool FULL, class Between>
SHARED void multiply_step(TileSums<S>& sums, TileSums<S>& exact, TileSums<S>& exact_high, const uchar* stage,
                          const TileRows& in, uint step, uint warp, uint lane, Between between) {
    typedef TileShape<S> T;
    const uint* codes = (const uint*)(stage + T::ROW_BYTES);
    const uchar* params = stage + T::ROW_BYTES + T::CODE_BYTES;
    const float* units = (const float*)(params + T::PARAM_BYTES);
    uint outputs = warp % 4 * 2, g = lane / 4, q = lane % 4;
    Fragments<S> f[2][2];
    Scales s[T::STEP_GROUPS][2];
    bool second = step * STEP + 32 < in.cols;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        StepWords<S> words;
        load_step<S>(words, codes + (outputs + m) * S::STEP_WORDS, lane);
        make_fragments<S, 0>(f[m][0], words);
        make_fragments<S, 1>(f[m][1], words);
#pragma unroll
        for (int group = 0; group < T::STEP_GROUPS; group++)
            s[group][m] = load_scales<S>(params + (outputs + m) * T::STEP_GROUPS * S::GROUP_BYTES, group, g);
    }
#pragma unroll
    for (int two = 0; two < T::ROW_TILES; two += 2) {
        if (!FULL && (two * ROW_WARPS + warp / 4) * 8 >= in.count) break;
#pragma unroll
        for (int n = two; n < two + 2; n++) {
            uint first = (n * ROW_WARPS + warp / 4) * 8;
            const uchar* row = stage + (first + g) * 128;
            uint swap = (g & 1) << 2;
            uint4 b0 = *(const uint4*)(row + (q ^ swap) * 16),
                  b1 = *(const uint4*)(row + ((4 + q) ^ swap) * 16);
            float low[2][4], high[2][4];
            clear(low);
            clear(high);
            float (*to)[4] = S::GROUP == 128 ? exact.v[n] : low;
            float (*to_high)[4] = S::GROUP == 128 ? exact_high.v[n] : high;
#pragma unroll
            for (int m = 0; m < 2; m++) multiply_fragments<S>(to[m], to_high[m], f[m][0], b0);
            if (S::GROUP == 32) {
                scale_tile<S>(sums.v[n], low, high, units, first + 2 * q, s[0]);
                clear(low);
                clear(high);
            }
            if (S::GROUP != 32 || second) {
#pragma unroll
                for (int m = 0; m < 2; m++) multiply_fragments<S>(to[m], to_high[m], f[m][1], b1);
            }
            if (S::GROUP == 32 && second)
                scale_tile<S>(sums.v[n], low, high, units + 2 * T::ROWS, first + 2 * q,
                              s[T::STEP_GROUPS - 1]);
            if (S::GROUP == 64) scale_tile<S>(sums.v[n], low, high, units, first + 2 * q, s[0]);
            if (S::GROUP == 128 && step % 2 == 1) {
                scale_tile<S>(sums.v[n], to, to_high, units, first + 2 * q, s[0]);
                clear(to);
                clear(to_high);
            }
        }
        between(two / 2);
    }
}

template <class S>
SHARED void clear_sums(TileSums<S>& sums) {
#pragma unroll
    for (int n = 0; n < TileShape<S>::ROW_TILES; n++) clear(sums.v[n]);
}

// Adds finished slice sums to the results; `place(n)` is where those of the tile's row n begin, null for a
// row whose results are not wanted. Slices before this one have put their total there.
template <class S, class Place>
SHARED void put_slice(const TileSums<S>& sums, uint outputs, uint tile, bool first_slice, const TileRows& in,
                      uint warp, uint lane, Place place) {
    uint g = lane / 4, q = lane % 4, first_output = (tile + warp % 4 * 2) * 16 + g;
#pragma unroll
    for (int n = 0; n < TileShape<S>::ROW_TILES; n += 2) {
        // All reads of two row tiles before any write: nobody knows that they do not overlap.
        float before[2][4][2];
        float* to[2][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint row = ((n + j / 2) * ROW_WARPS + warp / 4) * 8 + 2 * q + j % 2;
            float* from = row < in.count ? place(row) : nullptr;
            to[j / 2][j % 2] = from ? from + first_output : nullptr;
        }
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float* from = to[j / 8][j / 2 % 2];
            uint output = j % 2 * 16 + j / 4 % 2 * 8;
            bool there = !first_slice && from && first_output + output < outputs;
            before[j / 8][j / 2 % 4][j % 2] = there ? from[output] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float* at = to[j / 8][j / 2 % 2];
            uint output = j % 2 * 16 + j / 4 % 2 * 8;
            if (at && first_output + output < outputs)
                at[output] = before[j / 8][j / 2 % 4][j % 2] + sums.v[n + j / 8][j % 2][j / 2 % 4];
        }
    }
}

// The whole tile: outputs 16 tile .. + 127.
template <class S, class Place>
SHARED void multiply_tile(uchar* smem, const Packed& m, const TileRows& in, uint outputs, uint tile,
                          Place place) {
    typedef TileShape<S> T;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint tiles = (outputs + 15) / 16, steps = (in.cols + STEP - 1) / STEP;
    Fetch<S> fetch(m, in, tile, tiles);
    TileSums<S> sums, exact, exact_high;
    clear_sums<S>(sums);
    clear_sums<S>(exact);
    clear_sums<S>(exact_high);
    for (uint step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch.all(smem + step * T::STAGE_BYTES, in.count, step);
        copy_async_commit();
    }
    for (uint step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        uint next = step + STAGES - 1;
        uchar* to = smem + next % STAGES * T::STAGE_BYTES;
        const uchar* stage = smem + step % STAGES * T::STAGE_BYTES;
        // Smaller tiles have other blocks to overlap with, and fewer registers.
        if (T::ROWS == 128 && in.count == T::ROWS) {
            multiply_step<S, true>(sums, exact, exact_high, stage, in, step, warp, lane, [&](int at) {
                if (next < steps) fetch.part(at, to, in.count, next);
            });
        } else {
            if (next < steps) fetch.all(to, in.count, next);
            multiply_step<S, false>(sums, exact, exact_high, stage, in, step, warp, lane, [](int) {});
        }
        copy_async_commit();
        if ((step + 1) % SLICE_STEPS == 0 || step + 1 == steps) {
            put_slice<S>(sums, outputs, tile, step < SLICE_STEPS, in, warp, lane, place);
            clear_sums<S>(sums);
        }
    }
}
