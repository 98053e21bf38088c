// Warps that stream weights: each has a ring of *stages* in shared memory, so that the weights of the next
// steps, also of the next tile, are on their way while it multiplies. A stage is STAGE_STEPS steps of MATS
// matrices over the same inputs. A warp does whole slices, groups ascending: exact sums and slice sums stay
// in registers.
#pragma once
#include "linear_decode.cuh"

// Waits for the `threads` threads that share barrier `id` (1 to 15).
SHARED void team_sync(uint id, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// In one access: they lie at multiples of their size.
SHARED Unit load_unit(const Unit* at) {
    float2 v = *(const float2*)at;
    return Unit{v.x, v.y};
}
SHARED WideUnit load_unit(const WideUnit* at) {
    float4 v = *(const float4*)at;
    return WideUnit{v.x, v.y, v.z, v.w};
}

// A lane's slice sums: outputs g and g + 8 (i / 2) of rows 8 n + 2 q and 8 n + 2 q + 1 (i % 2).
template <int MATS, int NT>
struct SliceSums {
    float v[MATS][NT][4];
    SHARED void clear() {
#pragma unroll
        for (int i = 0; i < MATS * NT * 4; i++) v[i / 4 / NT][i / 4 % NT][i % 4] = 0.0f;
    }
    // To and from a team's shared memory, where a warp has a place of VALUES by 32 lanes.
    static const int VALUES = MATS * NT * 4;
    SHARED void put(float* to) const {
#pragma unroll
        for (int i = 0; i < VALUES; i++) to[i * 32] = v[i / 4 / NT][i / 4 % NT][i % 4];
    }
    // Totals: these are of the first slice, the others' lie in order.
    SHARED void add(const float* others, uint count) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            float& sum = v[i / 4 / NT][i / 4 % NT][i % 4];
            sum = 0.0f + sum;
            for (uint other = 0; other < count; other++) sum = sum + others[(other * VALUES + i) * 32];
        }
    }
    // Totals of a tile of which a team has a slice a warp: true in the first one, which gets them. `parts`:
    // the lane's part of the team's shared memory for this tile, slices - 1 places; the next tile takes
    // another.
    SHARED bool gather(float* parts, uint team, uint slices, uint slice) {
        if (slices > 1) {
            if (slice > 0) put(parts + (slice - 1) * VALUES * 32);
            team_sync(1 + team, 32 * slices);
            if (slice > 0) return false;
        }
        add(parts, slices - 1);
        return true;
    }
};

// What a lane multiplies a stage with, NT tiles of 8 rows: codes of its row of the first tile at the stage's
// first input, and units of rows 2 q and 2 q + 1 at its first group, UNIT_STRIDE apart. Bytes from tile to
// tile.
struct StreamRows {
    const uchar* codes;
    const uchar* units[2];
    uint codes_step, units_step;
};

template <class S, int MATS, int NT, int UNIT_STRIDE>
struct WeightRing {
    typedef typename UnitOf<S::WIDE>::Type U;
    static const int STAGE_STEPS = 4 / MATS, CODE_BYTES = STAGE_STEPS * S::STEP_WORDS * 4,
                     GROUPS = STAGE_STEPS * STEP / S::GROUP, PARAM_BYTES = GROUPS * S::GROUP_BYTES,
                     MATRIX_BYTES = CODE_BYTES + PARAM_BYTES, STAGE_BYTES = MATS * MATRIX_BYTES;
    uchar* stages;
    uint lane, next;
    const uchar* codes[MATS];
    const uchar* params[MATS];

    // The next fetches are of this slice of a tile of a matrix with `cols` inputs.
    SHARED void aim(int matrix, const Packed& m, uint tile, uint slice, uint cols) {
        uint step = tile * (cols / STEP) + slice * SLICE_STEPS;
        uint group = tile * (cols / S::GROUP) + slice * S::SLICE_GROUPS;
        codes[matrix] = (const uchar*)(m.codes + (ulong)step * S::STEP_WORDS) + lane * 16;
        params[matrix] = m.params + (ulong)group * S::GROUP_BYTES + lane * 16;
    }

    // Asks for the next stage if there is one; always one group of copies.
    SHARED void fetch(bool there) {
        uchar* to = stages + next * STAGE_BYTES + lane * 16;
        next = next + 1 == RING ? 0 : next + 1;
        if (there) {
#pragma unroll
            for (int m = 0; m < MATS; m++) {
                copy<CODE_BYTES>(to + m * MATRIX_BYTES, codes[m]);
                copy<PARAM_BYTES>(to + m * MATRIX_BYTES + CODE_BYTES, params[m]);
                codes[m] += CODE_BYTES, params[m] += PARAM_BYTES;
            }
        }
        copy_async_commit();
    }

    template <int BYTES>
    SHARED void copy(uchar* to, const uchar* from) const {
#pragma unroll
        for (int at = 0; at < BYTES; at += 512)
            if (BYTES - at >= 512 || lane * 16 < BYTES - at) copy_async_16(to + at, from + at);
    }

    // The oldest stage that was asked for, when it is there; the place of the one before it is free again.
    SHARED const uchar* oldest() const {
        copy_async_wait<RING - 2>();
        __syncwarp();
        return stages + (next + 1 == RING ? 0 : next + 1) * STAGE_BYTES;
    }

    // Adds a stage's groups to the sums; the rows move on to the next stage. ONE: only row 0 is wanted.
    template <bool ONE>
    SHARED void multiply(SliceSums<MATS, NT>& sums, const uchar* stage, StreamRows& rows) const {
        Exact<NT> exact[MATS];
#pragma unroll
        for (int m = 0; m < MATS; m++) exact[m].clear();
        const uchar* x = rows.codes + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; i++) {
            uint4 low[NT], high[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                low[n] = *(const uint4*)(x + n * rows.codes_step + i * 2 * STEP);
                high[n] = *(const uint4*)(x + n * rows.codes_step + i * 2 * STEP + 64);
            }
#pragma unroll
            for (int m = 0; m < MATS; m++) {
                const uchar* of = stage + m * MATRIX_BYTES;
                StepWords<S> words;
                load_step<S>(words, (const uint*)of + i * S::STEP_WORDS, lane);
                multiply_unit<S, 0, NT>(exact[m], words, low);
                if (S::GROUP == 32) finish<ONE>(sums.v[m], exact[m], of, rows, 2 * i);
                multiply_unit<S, 1, NT>(exact[m], words, high);
                if (S::GROUP == 32) finish<ONE>(sums.v[m], exact[m], of, rows, 2 * i + 1);
                if (S::GROUP == 64) finish<ONE>(sums.v[m], exact[m], of, rows, i);
                if (S::GROUP == 128 && i % 2 == 1) finish<ONE>(sums.v[m], exact[m], of, rows, i / 2);
            }
        }
        rows.codes += STAGE_STEPS * STEP * 2;
        rows.units[0] += GROUPS * UNIT_STRIDE, rows.units[1] += GROUPS * UNIT_STRIDE;
    }

    template <bool ONE>
    SHARED void finish(float (&sums)[NT][4], Exact<NT>& exact, const uchar* of, const StreamRows& rows,
                       int group) const {
        Scales s = load_scales<S>(of + CODE_BYTES, group, lane / 4);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            U u[2];
#pragma unroll
            for (int i = 0; i < (ONE ? 1 : 2); i++)
                u[i] = load_unit((const U*)(rows.units[i] + n * rows.units_step + group * UNIT_STRIDE));
#pragma unroll
            for (int i = 0; i < 4; i += ONE ? 2 : 1)
                sums[n][i] = scale_group<S>(sums[n][i], exact.low[n][i], exact.high[n][i], u[i % 2],
                                            s.scale[i / 2], s.bias[i / 2]);
        }
        exact.clear();
    }
};
