// Blocks of the decode form for 1 to 8 rows. What costs time there is waiting, so the work is cut small and
// every wait is begun early: a *job* is four steps of one tile, done by one warp out of registers. A job's
// weights are asked for before the launch before has ended, its rows all at once. The exact sums of all
// groups meet in shared memory; then one thread an output, row and slice scales them, groups ascending, and
// slices are added ascending. Compiled for the number of inputs and for exactly THREADS threads a block.
#pragma once
#include "linear_decode.cuh"

#define JOB_STEPS 4

// Exact sums of a group: [row][16 outputs], rows apart so that the lanes of a fragment meet different banks.
// Of one row: [outputs below 8 or not][lane's q][8], where q above 0 is of no use but stored all the same: a
// condition would keep steps from overlapping.
#define EXACT_STRIDE 20
#define EXACT_WORDS (ONE_ROW ? 64 : ROWS * EXACT_STRIDE)

// Weights stream past the nearest cache, which keeps the rows.
SHARED uint4 load_stream_16(const uint* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
SHARED uint2 load_stream_8(const uint* at) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
SHARED uint load_stream_4(const uint* at) {
    uint v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

template <int WIDTH>
SHARED void stream_plane(uint* words, const uint* plane, uint lane) {
    if constexpr (WIDTH == 4) {
        uint4 v = load_stream_16(plane + 4 * lane);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (WIDTH == 2) {
        uint2 v = load_stream_8(plane + 2 * lane);
        words[0] = v.x, words[1] = v.y;
    } else {
        words[0] = load_stream_4(plane + lane);
    }
}

// Registers of a job: weights, and the lane's row of codes. What follows from INPUTS is constant.
template <class S, int INPUTS>
struct Job {
    static const int UNITS = INPUTS / 32, STEPS = (INPUTS + STEP - 1) / STEP,
                     JOBS = (STEPS + JOB_STEPS - 1) / JOB_STEPS;
    // Every step of every job is there, with both its units.
    static const bool WHOLE = INPUTS % (JOB_STEPS * STEP) == 0;
    StepWords<S> words[JOB_STEPS];
    uint4 x[JOB_STEPS][2];

    // Asks for the weights of steps first .. of a tile.
    SHARED void load_weights(const Packed& m, uint tile, uint first, uint lane) {
        const int low = S::BITS >= 4 ? 4 : 2, high = S::BITS == 8 ? 4 : S::BITS == 6 ? 2 : 1;
        const uint* at = m.codes + ((ulong)tile * STEPS + first) * S::STEP_WORDS;
#pragma unroll
        for (int i = 0; i < JOB_STEPS; i++, at += S::STEP_WORDS) {
            if (!WHOLE && first + i >= STEPS) break;
            stream_plane<low>(words[i].w, at, lane);
            if constexpr (S::BITS > low) stream_plane<high>(words[i].w + low, at + 32 * low, lane);
        }
    }

    // Asks for the row's codes; `row` is the lane's row (shared or global memory).
    SHARED void load_row(const uchar* row, uint first, uint lane) {
        row += first * STEP * 2 + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < JOB_STEPS; i++)
#pragma unroll
            for (int t = 0; t < 2; t++)
                x[i][t] = WHOLE || 2 * (first + i) + t < UNITS ? *(const uint4*)(row + (2 * i + t) * 64)
                                                               : make_uint4(0, 0, 0, 0);
    }

    // The row that another job has.
    SHARED void take_row(const Job& other) {
#pragma unroll
        for (int i = 0; i < JOB_STEPS; i++) x[i][0] = other.x[i][0], x[i][1] = other.x[i][1];
    }

    // Exact sums of the job's groups, to `exact` [group][row][16 outputs] of the tile.
    SHARED void multiply(float* exact, uint first, uint lane) {
        multiply_codes(exact, first, lane, [&](int i, int t) { return x[i][t]; });
    }

    // The same with codes from `row`, the lane's row in shared memory: fewer registers.
    SHARED void multiply_row(float* exact, uint first, uint lane, const uchar* row) {
        row += first * STEP * 2 + lane % 4 * 16;
        multiply_codes(exact, first, lane, [&](int i, int t) {
            return WHOLE || 2 * (first + i) + t < UNITS ? *(const uint4*)(row + (2 * i + t) * 64)
                                                        : make_uint4(0, 0, 0, 0);
        });
    }

    // `codes(i, t)`: the lane's codes of unit t of step i.
    template <class F>
    SHARED void multiply_codes(float* exact, uint first, uint lane, F codes) {
        exact += first * STEP / S::GROUP * EXACT_WORDS;
        Exact<1> sums;
        sums.clear();
#pragma unroll
        for (int i = 0; i < JOB_STEPS; i++) {
            if (!WHOLE && 2 * (first + i) >= UNITS) break;
            // Two steps overlap; more would want registers that keep other warps out.
            if (i == JOB_STEPS / 2) asm volatile("" ::: "memory");
            uint4 low = codes(i, 0), high = codes(i, 1);
            multiply_unit<S, 0, 1>(sums, words[i], &low);
            if (S::GROUP == 32) {
                put(exact + 2 * i * EXACT_WORDS, sums, lane);
                if (!WHOLE && 2 * (first + i) + 1 >= UNITS) break;
            }
            multiply_unit<S, 1, 1>(sums, words[i], &high);
            if (S::GROUP == 32) put(exact + (2 * i + 1) * EXACT_WORDS, sums, lane);
            if (S::GROUP == 64) put(exact + i * EXACT_WORDS, sums, lane);
            if (S::GROUP == 128 && i % 2 == 1) put(exact + i / 2 * EXACT_WORDS, sums, lane);
        }
    }

    // Two digits become one integer, less 8 csum, kept as bits.
    SHARED static float joined(float low, float high) {
        return S::WIDE ? __int_as_float((int)high * 16 + (int)low) : low;
    }

    SHARED static void put(float* to, Exact<1>& sums, uint lane) {
        uint g = lane / 4, q = lane % 4;
        if (ONE_ROW) {
            to[q * 8 + g] = joined(sums.low[0][0], sums.high[0][0]);
            to[32 + q * 8 + g] = joined(sums.low[0][2], sums.high[0][2]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (ROWS >= 8 || 2 * q + i % 2 < ROWS)
                    to[(2 * q + i % 2) * EXACT_STRIDE + g + i / 2 * 8] =
                        joined(sums.low[0][i], sums.high[0][i]);
        }
        sums.clear();
    }
};

// One output of one row over one slice, from the sums of the tile, its scales, and the row's units and code
// sums by group.
template <class S, int INPUTS>
SHARED float scale_slice(const float* exact, const uchar* params, const float* units, const float* sums,
                         uint row, uint output, uint slice) {
    const float center = (float)(1 << (S::BITS - 1));
    const int size = S::DTYPE == 2 ? 4 : 2, groups = INPUTS / S::GROUP;
    const uint first = slice * S::SLICE_GROUPS;
    exact += first * EXACT_WORDS + (ONE_ROW ? output / 8 * 32 + output % 8 : row * EXACT_STRIDE + output);
    params += first * S::GROUP_BYTES + output % 8 * (S::GROUP_BYTES / 8) + output / 8 * size;
    units += first, sums += first;
    float acc = 0.0f;
#pragma unroll 8
    for (uint group = 0; group < (groups % S::SLICE_GROUPS == 0 ? S::SLICE_GROUPS
                                                                : min(groups - first, (uint)S::SLICE_GROUPS));
         group++) {
        const uchar* at = params + group * S::GROUP_BYTES;
        float scale = S::DTYPE == 2 ? *(const float*)at : stored_float<S::DTYPE>(*(const ushort*)at, 0);
        float value = exact[group * EXACT_WORDS], unit = units[group], sum = sums[group];
        if (S::WIDE) value = (float)((int)BITS(value) + 8 * (int)sum);
        acc = FMA(value, scale * unit, acc);
        if (S::AFFINE) {
            at += 2 * size;
            float bias = S::DTYPE == 2 ? *(const float*)at : stored_float<S::DTYPE>(*(const ushort*)at, 0);
            acc = FMA(FMA(center, scale, bias), sum * unit, acc);
        }
    }
    return acc;
}

// Shared memory of a block, bytes from its start: staged rows (first), scales of the tiles, units and code
// sums [row][group] (of at most `unit_groups` groups), exact sums, slice sums.
struct FewPlaces {
    uint unit_groups, row_stride, params_at, param_bytes, units_at, exact_at, exact_bytes, sums_at;
};

// Copies the scales of a tile, by all threads.
template <class S, int INPUTS>
SHARED void fetch_params(uchar* to, const Packed& m, uint tile) {
    const uint bytes = INPUTS / S::GROUP * S::GROUP_BYTES;
    const uchar* from = m.params + (ulong)tile * bytes;
#pragma unroll 1
    for (uint at = threadIdx.x * 16; at < bytes; at += THREADS * 16) copy_async_16(to + at, from + at);
}

// Queues the copies of the rows' codes, by all threads: a row every `stride` bytes.
template <int INPUTS>
SHARED void stage_codes(uchar* to, uint stride, const InputCodes& in, const Rows& rows) {
    const uint chunks = INPUTS / 8;
#pragma unroll 1
    for (uint i = threadIdx.x; i < (ONE_ROW ? 1 : rows.count) * chunks; i += THREADS) {
        uint n = ONE_ROW ? 0 : i / chunks, chunk = i % chunks;
        copy_async_16(to + n * stride + chunk * 16, in.codes + ((ulong)rows.row(n) * INPUTS + chunk * 8) * 2);
    }
}

// Queues the copies of the rows' units and code sums, by all threads: [row][group] each.
template <int GROUPS>
SHARED void stage_units(float* to, const InputCodes& in, const Rows& rows) {
    if (ONE_ROW) {
#pragma unroll 1
        for (uint group = threadIdx.x; group < GROUPS; group += THREADS) {
            ulong at = (ulong)rows.row(0) * GROUPS + group;
            copy_async_4(to + group, in.units + at);
            copy_async_4(to + GROUPS + group, in.sums + at);
        }
        return;
    }
#pragma unroll 1
    for (uint i = threadIdx.x; i < rows.count * GROUPS; i += THREADS) {
        uint row = i / GROUPS, group = i % GROUPS;
        ulong at = (ulong)rows.row(row) * GROUPS + group;
        copy_async_4(to + i, in.units + at);
        copy_async_4(to + ROWS * GROUPS + i, in.sums + at);
    }
}

// Calls f(tile, slice, row, output) for TILES tiles, SLICES slices, `rows` rows, 16 outputs: half a warp
// each.
template <int TILES_, int SLICES, class F>
SHARED void for_outputs(uint rows, F f) {
    uint output = threadIdx.x % 16;
    for (uint i = threadIdx.x / 16; i < TILES_ * SLICES * (ONE_ROW ? 1 : rows); i += THREADS / 16) {
        uint at = i % (TILES_ * SLICES);
        f(at / SLICES, at % SLICES, ONE_ROW ? 0 : i / (TILES_ * SLICES), output);
    }
}
