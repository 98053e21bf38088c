// Tiles of the prompt form: 128 outputs by 128 (or 64) rows of a grouped matrix, through a pipeline of steps in shared
// memory. Eight warps, four along outputs (32 each), two along rows: warp w of these takes the row tiles w, w + 2, ...
// of 8 rows, so that missing rows cost nothing. Group sums stay in tensor-core accumulators; each is scaled as in
// the decode form, groups ascending; a finished slice is added to what `out` holds of the slices before it, by the
// thread that wrote it. Shared by linear_prompt.cu and experts_prompt.cu.
#pragma once
#include "linear.cuh"

#define STAGES 4
#define TILE_OUTPUTS 128
#define TILE_THREADS 256

template <class S>
struct TileShape {
    // Sums that live across steps (groups of 128) and second digits need the registers of half the rows.
    static const int ROWS = S::GROUP == 128 || S::WIDE ? 64 : 128;
    static const int ROW_TILES = ROWS / 16;  // of 8 rows, a warp
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

// 16 bytes, or zeros.
SHARED void copy_async_16_or_zeros(void* to, const void* from, bool there) {
    uint at = (uint)__cvta_generic_to_shared(to), bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

// Copies of one step into a stage: codes of rows (16-byte chunks of odd rows swap halves, against bank conflicts),
// codes of weights, scales, units.
template <class S>
SHARED void fetch_step(uchar* stage, const Packed& m, const TileRows& in, const uint* row_of, uint tile, uint tiles,
                       uint step) {
    typedef TileShape<S> T;
    uint t = threadIdx.x, steps = (in.cols + STEP - 1) / STEP, groups = in.cols / S::GROUP;
#pragma unroll
    for (int j = 0; j < T::ROWS / 32; j++) {
        uint row = t / 8 + 32 * j, chunk = t % 8;
        if (row >= in.count) break;
        bool there = step * STEP + chunk * 8 < in.cols;
        const uchar* from = in.codes + ((ulong)row_of[j] * in.cols + step * STEP + chunk * 8) * 2;
        copy_async_16_or_zeros(stage + row * 128 + (chunk ^ (row & 1) << 2) * 16, there ? from : in.codes, there);
    }
    uchar* codes = stage + T::ROW_BYTES;
    const uint chunks = 8 * S::BITS;
#pragma unroll
    for (uint i = t; i < 8 * chunks; i += TILE_THREADS) {
        uint own = min(tile + i / chunks, tiles - 1);
        const uchar* from = (const uchar*)(m.codes + ((ulong)own * steps + step) * S::STEP_WORDS);
        copy_async_16(codes + i * 16, from + i % chunks * 16);
    }
    uchar* params = codes + T::CODE_BYTES;
    const uint param_chunks = T::STEP_GROUPS * S::GROUP_BYTES / 16;
    uint first_group = step * STEP / S::GROUP;
    if (t < 8 * param_chunks) {
        uint own = min(tile + t / param_chunks, tiles - 1), chunk = t % param_chunks;
        if (first_group + chunk / (S::GROUP_BYTES / 16) < groups)
            copy_async_16(params + t * 16, m.params + ((ulong)own * groups + first_group) * S::GROUP_BYTES + chunk * 16);
    }
    float* units = (float*)(params + T::PARAM_BYTES);
#pragma unroll
    for (uint i = t; i < T::STEP_GROUPS * 2 * T::ROWS; i += TILE_THREADS) {
        uint row = i % T::ROWS, which = i / T::ROWS % 2, group = first_group + i / (2 * T::ROWS);
        if (row < in.count && group < groups)
            copy_async_4(units + i, (which ? in.sums : in.units) + (ulong)in.row(row) * groups + group);
    }
}

template <class S>
struct TileSums {
    float v[TileShape<S>::ROW_TILES][2][4];
};

// Adds a group's exact sums of one row tile to its slice sums. `units` of the group: [unit, sum][row].
template <class S>
SHARED void scale_tile(float acc[2][4], const float low[2][4], const float high[2][4], const float* units, uint row,
                       const Scales s[2]) {
    typedef TileShape<S> T;
    float2 unit = *(const float2*)(units + row), sum = *(const float2*)(units + T::ROWS + row);
    typename UnitOf<S::WIDE>::Type u[2];
    make_unit(unit.x, sum.x, u[0]);
    make_unit(unit.y, sum.y, u[1]);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[m][i] = scale_group<S>(acc[m][i], low[m][i], high[m][i], u[i % 2], s[m].scale[i / 2], s[m].bias[i / 2]);
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

// One step of the pipeline. `exact`: sums that live across steps, for groups of 128.
template <class S>
SHARED void multiply_step(TileSums<S>& sums, TileSums<S>& exact, TileSums<S>& exact_high, const uchar* stage,
                          const TileRows& in, uint step, uint warp, uint lane) {
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
    for (int n = 0; n < T::ROW_TILES; n++) {
        uint first = (n * 2 + warp / 4) * 8;
        if (first >= in.count) break;
        const uchar* row = stage + (first + g) * 128;
        uint swap = (g & 1) << 2;
        uint4 b0 = *(const uint4*)(row + (q ^ swap) * 16), b1 = *(const uint4*)(row + ((4 + q) ^ swap) * 16);
        float low[2][4], high[2][4];
        clear(low);
        clear(high);
        float(*to)[4] = S::GROUP == 128 ? exact.v[n] : low;
        float(*to_high)[4] = S::GROUP == 128 ? exact_high.v[n] : high;
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
            scale_tile<S>(sums.v[n], low, high, units + 2 * T::ROWS, first + 2 * q, s[T::STEP_GROUPS - 1]);
        if (S::GROUP == 64) scale_tile<S>(sums.v[n], low, high, units, first + 2 * q, s[0]);
        if (S::GROUP == 128 && step % 2 == 1) {
            scale_tile<S>(sums.v[n], to, to_high, units, first + 2 * q, s[0]);
            clear(to);
            clear(to_high);
        }
    }
}

template <class S>
SHARED void clear_sums(TileSums<S>& sums) {
#pragma unroll
    for (int n = 0; n < TileShape<S>::ROW_TILES; n++) clear(sums.v[n]);
}

// Adds finished slice sums to `out` [row][outputs]; `place(n)` is the row of out of the tile's row n. Slices before
// this one have put their total there.
template <class S, class Place>
SHARED void put_slice(const TileSums<S>& sums, float* out, uint outputs, uint tile, bool first_slice, const TileRows& in,
                      uint warp, uint lane, Place place) {
    uint g = lane / 4, q = lane % 4, first_output = (tile + warp % 4 * 2) * 16 + g;
#pragma unroll
    for (int n = 0; n < TileShape<S>::ROW_TILES; n += 2) {
        // All reads of two row tiles before any write: nobody knows that they do not overlap.
        float before[2][4][2];
        float* to[2][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint row = ((n + j / 2) * 2 + warp / 4) * 8 + 2 * q + j % 2;
            to[j / 2][j % 2] = row < in.count ? out + (ulong)place(row) * outputs + first_output : nullptr;
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
SHARED void multiply_tile(uchar* smem, const Packed& m, const TileRows& in, float* out, uint outputs, uint tile, Place place) {
    typedef TileShape<S> T;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint tiles = (outputs + 15) / 16, steps = (in.cols + STEP - 1) / STEP;
    uint row_of[T::ROWS / 32];
#pragma unroll
    for (int j = 0; j < T::ROWS / 32; j++) row_of[j] = in.row(min(threadIdx.x / 8 + 32 * j, in.count - 1));
    TileSums<S> sums, exact, exact_high;
    clear_sums<S>(sums);
    clear_sums<S>(exact);
    clear_sums<S>(exact_high);
    for (uint step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch_step<S>(smem + step * T::STAGE_BYTES, m, in, row_of, tile, tiles, step);
        copy_async_commit();
    }
    for (uint step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        uint next = step + STAGES - 1;
        if (next < steps) fetch_step<S>(smem + next % STAGES * T::STAGE_BYTES, m, in, row_of, tile, tiles, next);
        copy_async_commit();
        multiply_step<S>(sums, exact, exact_high, smem + step % STAGES * T::STAGE_BYTES, in, step, warp, lane);
        if ((step + 1) % SLICE_STEPS == 0 || step + 1 == steps) {
            put_slice<S>(sums, out, outputs, tile, step < SLICE_STEPS, in, warp, lane, place);
            clear_sums<S>(sums);
        }
    }
}
