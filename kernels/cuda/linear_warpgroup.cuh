// Prompt tiles on Hopper: 128 outputs by up to 128 rows of a grouped matrix of up to 4 bits in groups of 64 or
// 128, or by up to 64 rows of one of two digits in groups of 64. Two warpgroups multiply, 64 outputs each:
// weights out of registers, rows of codes out of a ring of steps in shared memory that a third warpgroup
// fills. While one of the two scales its finished group sums, the products of the other run.
//
// Rows come aligned (align.cu): codes of a row and slice share one unit, so that groups are scaled by
// acc = fma(I, s, acc), then fma(b', csum, acc), and the unit, a power of two, is put on the slice sum: the
// same bits as long as nothing underflows, which matrices with scales and biases of ordinary size grant
// (packing.rs). Two digits: I = 16 (I1 + csum / 2) + I0, where the sum of (w1 + 1/2) code stays below 2^23
// and is exact. Inside each 32 inputs of a row, codes lie as the fragments want them: pair p of the chunk of
// lane q at pair 4 p + q.
#pragma once
#include "linear.cuh"
#include "warpgroup.cuh"

#define TILE_OUTPUTS 128
#define PRODUCT_THREADS 256
#define TILE_THREADS 384
// Registers of a thread that fills and of one that multiplies: 64 Ki for the block.
#define FILL_REGISTERS 56
#define PRODUCT_REGISTERS 224
// Steps between the start of a step's copies and the report that it is there.
#define COPY_STEPS 4

// Aligned rows: halves [rows, cols], sums of codes in aligned units [rows, groups], units [rows, slices].
struct AlignedRows {
    const uchar* codes;
    const float* sums;
    const float* units;
};

template <class S>
struct RingShape {
    static_assert(S::WIDE ? S::GROUP == 64 : S::GROUP >= 64, "kinds with a warpgroup form");
    static const int ROWS = S::WIDE ? 64 : 128;
    static const int ROW_BYTES = ROWS * 2 * STEP;
    static const int CODE_BYTES = 8 * S::STEP_WORDS * 4;
    static const int PARAM_BYTES = 8 * S::GROUP_BYTES;
    static const int SUM_BYTES = 4 * ROWS;
    static const int SUMS_AT = ROW_BYTES + CODE_BYTES + PARAM_BYTES, UNITS_AT = SUMS_AT + SUM_BYTES;
    static const int STAGE_BYTES = (UNITS_AT + SUM_BYTES + 1023) / 1024 * 1024;
};

// What a tile multiplies: `count` rows (row n is `index[n] / divisor`, or first + n) of `cols` inputs by the
// outputs 16 tile .. + 127 of `tiles` tiles.
struct RingTile {
    Packed weights;
    AlignedRows rows;
    const uint* index;
    uint divisor, first, count, cols, tile, outputs;
    SHARED uint row(uint n) const { return index ? index[n] / divisor : first + n; }
};

// The ring: STAGES stages and two barriers for each. Counts steps of all tiles of the block.
struct Ring {
    uchar* stages;
    ulong* full;
    ulong* empty;
    uint step, stage, parity;

    SHARED Ring(uchar* smem) {
        full = (ulong*)smem;
        empty = full + STAGES;
        stages = smem + 1024;
        step = 0, stage = 0, parity = 0;
    }
    SHARED void init(uint thread) {
        if (thread < STAGES) {
            barrier_init(full + thread, 128);
            barrier_init(empty + thread, PRODUCT_THREADS / 32);
        }
        __syncthreads();
    }
    SHARED void next() {
        step++;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The thread's part in filling the ring; `reported`: the stage whose copies are reported next.
template <class S>
struct Filler {
    typedef RingShape<S> R;
    static const uint CHUNKS = 8 * S::BITS, PARAM_CHUNKS = S::GROUP_BYTES / 16;
    static const int CODE_COPIES = (8 * CHUNKS + 127) / 128;
    uint reported;

    SHARED void report(Ring& ring) {
        publish_to_products();
        barrier_arrive(ring.full + reported);
        if (++reported == STAGES) reported = 0;
    }

    template <int ROWS>
    SHARED void tile(Ring& ring, const RingTile& in, uint t) {
        uint steps = in.cols / STEP, groups = in.cols / S::GROUP, slices = (in.cols + 1023) / 1024;
        uint tiles = (in.outputs + 15) / 16;
        // Row copies: chunk t % 8 of rows t / 8, t / 8 + 16, ...
        uint from[ROWS / 16];
        const uchar* rows = in.rows.codes + t % 8 * 16;
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++)
            from[j] = in.row(min(t / 8 + 16 * j, in.count - 1)) * (in.cols / 32);
        const uchar* codes[CODE_COPIES];
#pragma unroll
        for (int j = 0; j < CODE_COPIES; j++) {
            uint i = t + 128 * j, own = min(in.tile + i / CHUNKS, tiles - 1);
            codes[j] =
                (const uchar*)(in.weights.codes + (ulong)own * steps * S::STEP_WORDS) + i % CHUNKS * 16;
        }
        uint own = min(in.tile + t / PARAM_CHUNKS, tiles - 1);
        const uchar* params =
            in.weights.params + (ulong)own * groups * S::GROUP_BYTES + t % PARAM_CHUNKS * 16;
        uint row = in.row(min(t, in.count - 1));
        const float* sums = in.rows.sums + (ulong)row * groups;
        const float* units = in.rows.units + (ulong)row * slices;
        uint to_row = t / 8 * 128 + (t % 8 ^ t / 8 % 8) * 16;
#pragma unroll 1
        for (uint step = 0; step < steps; step++) {
            barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
            uchar* stage = ring.stages + ring.stage * R::STAGE_BYTES;
#pragma unroll
            for (int j = 0; j < ROWS / 16; j++)
                copy_async_16(stage + to_row + j * 2048, rows + (ulong)from[j] * 64);
            rows += 2 * STEP;
#pragma unroll
            for (int j = 0; j < CODE_COPIES; j++) {
                if (8 * CHUNKS % 128 == 0 || t + 128 * j < 8 * CHUNKS)
                    copy_async_16(stage + R::ROW_BYTES + (t + 128 * j) * 16, codes[j]);
                codes[j] += S::STEP_WORDS * 4;
            }
            if (t < 8 * PARAM_CHUNKS) copy_async_16(stage + R::ROW_BYTES + R::CODE_BYTES + t * 16, params);
            if (t < ROWS) {
                copy_async_4(stage + R::SUMS_AT + t * 4, sums);
                if ((step + 1) % SLICE_STEPS == 0 || step + 1 == steps)
                    copy_async_4(stage + R::UNITS_AT + t * 4, units + step / SLICE_STEPS);
            }
            if (S::GROUP == 64 || step % 2 == 1) params += S::GROUP_BYTES, sums++;
            copy_async_commit();
            copy_async_wait<COPY_STEPS>();
            if (ring.step >= COPY_STEPS) report(ring);
            ring.next();
        }
    }

    // Reports the last steps.
    SHARED void finish(Ring& ring) {
        copy_async_wait<0>();
        for (uint left = min(ring.step, (uint)COPY_STEPS); left > 0; left--) report(ring);
    }
};

// Fragments of a warp's 16 outputs by one step, of both digits.
template <class S>
struct StepFragments {
    uint low[4][4], high[S::WIDE ? 4 : 1][4];
};

template <class S>
SHARED void make_step(StepFragments<S>& f, const uchar* stage, uint tile, uint lane) {
    StepWords<S> words;
    load_step<S>(words, (const uint*)(stage + RingShape<S>::ROW_BYTES) + tile * S::STEP_WORDS, lane);
    fragment<S, 0, 0, false>(f.low[0], words);
    fragment<S, 0, 1, false>(f.low[1], words);
    fragment<S, 1, 0, false>(f.low[2], words);
    fragment<S, 1, 1, false>(f.low[3], words);
    if constexpr (S::WIDE) {
        fragment<S, 0, 0, true>(f.high[0], words);
        fragment<S, 0, 1, true>(f.high[1], words);
        fragment<S, 1, 0, true>(f.high[2], words);
        fragment<S, 1, 1, true>(f.high[3], words);
    }
}

// Sums of a warp: d[4 j + i] as in `multiply_warpgroup`.
template <int ROWS>
struct RingSums {
    float v[ROWS / 2];
};

// Exact sums of a group in the making, of both digits.
template <class S, int ROWS>
struct ExactSums {
    float low[ROWS / 2], high[S::WIDE ? ROWS / 2 : 1];
};

// The warp needs the stage no longer.
SHARED void give_back(ulong* empty, uint lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
}

// One step: its products begin, the fragments of the next step are made, and the group, if it ends here, is
// scaled. `last`: the tile has no next step.
template <class S, int ROWS>
SHARED void ring_step(Ring& ring, RingSums<ROWS>& sums, ExactSums<S, ROWS>& exact, StepFragments<S>& own,
                      StepFragments<S>& next, uint step, bool last, uint tile, uint lane) {
    typedef RingShape<S> R;
    const uchar* stage = ring.stages + ring.stage * R::STAGE_BYTES;
    const bool ends = S::GROUP == 64 || step % 2 == 1;
    ulong b = operand(stage);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint add = k > 0 || (S::GROUP == 128 && step % 2 == 1);
        multiply_warpgroup<ROWS>(exact.low, own.low[k], b + 2 * k, add);
        if constexpr (S::WIDE) multiply_warpgroup<ROWS>(exact.high, own.high[k], b + 2 * k, add);
    }
    products_commit();
    ring.next();
    if (!last) {
        barrier_wait(ring.full + ring.stage, ring.parity);
        make_step<S>(next, ring.stages + ring.stage * R::STAGE_BYTES, tile, lane);
    }
    Scales s = load_scales<S>(stage + R::ROW_BYTES + R::CODE_BYTES + tile * S::GROUP_BYTES, 0, lane / 4);
    const float* row_sums = (const float*)(stage + R::SUMS_AT) + lane % 4 * 2;
    products_wait<0>();
    if (ends) {
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float2 sum = *(const float2*)(row_sums + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& acc = sums.v[4 * n + i];
                float own_sum = i % 2 ? sum.y : sum.x, group = exact.low[4 * n + i];
                if constexpr (S::WIDE) group = FMA(16.0f, FMA(0.5f, own_sum, exact.high[4 * n + i]), group);
                acc = FMA(group, s.scale[i / 2], acc);
                if (S::AFFINE) acc = FMA(s.bias[i / 2], own_sum, acc);
            }
        }
    }
}

// Adds finished slice sums to the totals, which threads keep in `totals` (shared memory, 64 KiB), gives the
// stage back, and puts the last totals where the rows' results begin (`place(n)`).
template <class S, int ROWS, class Place>
SHARED void ring_slice(RingSums<ROWS>& sums, const Ring& ring, uint stage, float* totals, bool first,
                       bool last, const RingTile& in, uint warp, uint lane, Place place) {
    typedef RingShape<S> R;
    const float* units = (const float*)(ring.stages + stage * R::STAGE_BYTES + R::UNITS_AT);
    float4* mine = (float4*)totals + threadIdx.x;
    uint output = in.tile * 16 + warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        float2 unit = *(const float2*)(units + 8 * n + lane % 4 * 2);
        float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : mine[n * PRODUCT_THREADS];
        float* v = sums.v + 4 * n;
        v[0] = before.x + v[0] * unit.x, v[1] = before.y + v[1] * unit.y;
        v[2] = before.z + v[2] * unit.x, v[3] = before.w + v[3] * unit.y;
        if (!last) mine[n * PRODUCT_THREADS] = make_float4(v[0], v[1], v[2], v[3]);
    }
    give_back(ring.empty + stage, lane);
    if (last) {
        // Addresses are made here, not kept in registers since the tile began.
        uint pair = lane % 4 * 2;
        asm volatile("" : "+r"(pair));
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint row = 8 * n + pair + j;
                if (row >= in.count) continue;
                float* to = place(row) + output;
                if (output < in.outputs) to[0] = sums.v[4 * n + j];
                if (output + 8 < in.outputs) to[8] = sums.v[4 * n + 2 + j];
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sums.v[i] = 0.0f;
}

// The products of a tile by the two multiplying warpgroups.
template <class S, int ROWS, class Place>
SHARED void ring_tile(Ring& ring, float* totals, const RingTile& in, Place place) {
    typedef RingShape<S> R;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = in.cols / STEP;
    RingSums<ROWS> sums;
    ExactSums<S, ROWS> exact;
    StepFragments<S> even, odd;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        sums.v[i] = 0.0f, exact.low[i] = 0.0f;
        if (S::WIDE) exact.high[i] = 0.0f;
    }
    barrier_wait(ring.full + ring.stage, ring.parity);
    make_step<S>(even, ring.stages + ring.stage * R::STAGE_BYTES, warp, lane);
#pragma unroll 1
    for (uint step = 0; step < steps; step += 2) {
        uint stage = ring.stage;
        bool last = step + 1 == steps;
        ring_step<S, ROWS>(ring, sums, exact, even, odd, step, last, warp, lane);
        if (!last) {
            give_back(ring.empty + stage, lane);
            stage = ring.stage;
            last = step + 2 == steps;
            ring_step<S, ROWS>(ring, sums, exact, odd, even, step + 1, last, warp, lane);
        }
        if (last || (step + 2) % SLICE_STEPS == 0)
            ring_slice<S, ROWS>(sums, ring, stage, totals, step < SLICE_STEPS, last, in, warp, lane, place);
        else
            give_back(ring.empty + stage, lane);
    }
}

// f(form) with the least form of the products that has `count` rows, at most MAX.
template <int ROWS>
struct RowForm {
    static const int COUNT = ROWS;
};
template <int MAX, class F>
SHARED void with_rows(uint count, F f) {
    if (count <= 32) return f(RowForm<32>());
    if constexpr (MAX == 64) {
        f(RowForm<64>());
    } else {
        if (count <= 64) return f(RowForm<64>());
        if (count <= 96) return f(RowForm<96>());
        f(RowForm<128>());
    }
}

// All of a block's tiles. `Tiles`: kind of matrix `Stored`, `count()`, `tile(n)`, and `place(n)`, which says
// where results of the tile's rows begin.
template <class Tiles>
SHARED void run_ring(uchar* dynamic, const Tiles& tiles) {
    uchar* smem = dynamic + (1024 - (uint)__cvta_generic_to_shared(dynamic) % 1024) % 1024;
    Ring ring(smem);
    ring.init(threadIdx.x);
    if (threadIdx.x >= PRODUCT_THREADS) {
        fewer_registers<FILL_REGISTERS>();
        Filler<typename Tiles::Stored> filler = {0};
        for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
            RingTile in = tiles.tile(n);
            with_rows<RingShape<typename Tiles::Stored>::ROWS>(in.count, [&](auto rows) {
                filler.template tile<decltype(rows)::COUNT>(ring, in, threadIdx.x - PRODUCT_THREADS);
            });
        }
        filler.finish(ring);
    } else {
        more_registers<PRODUCT_REGISTERS>();
        float* totals = (float*)(ring.stages + STAGES * RingShape<typename Tiles::Stored>::STAGE_BYTES);
        for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
            RingTile in = tiles.tile(n);
            with_rows<RingShape<typename Tiles::Stored>::ROWS>(in.count, [&](auto rows) {
                ring_tile<typename Tiles::Stored, decltype(rows)::COUNT>(ring, totals, in, tiles.place(n));
            });
        }
    }
}
