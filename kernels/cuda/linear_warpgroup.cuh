// Prompt tiles on Hopper: 128 outputs by up to 128 rows of a grouped matrix of up to 4 bits in groups of 64
// or 128, or by up to 64 rows of one of two digits in groups of 64. Two warpgroups multiply, 64 outputs each:
// weights out of registers, rows of codes out of a ring of steps in shared memory that a third warpgroup
// fills. Each works on two halves of the rows in turn: while the group sums of one are scaled, the products
// of the other run.
//
// Rows come aligned (align.cu): codes of a row and slice share one unit, so that groups are scaled by
// acc = fma(I, s, acc), then fma(b', csum, acc), and the unit, a power of two, is put on the slice sum: the
// same bits as long as nothing underflows, which matrices with scales and biases of ordinary size grant
// (packing.rs). Two digits: I = 16 (I1 + csum / 2) + I0, where the sum of (w1 + 1/2) code stays below 2^23
// and is exact.
#pragma once
#include "ring.cuh"

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

// The products of a warpgroup: 64 outputs by ROWS rows, in PARTS parts along the rows. Values of a part:
// [4 j + i] as in `multiply_warpgroup`.
template <class S, int ROWS>
struct RingProducts {
    typedef RingShape<S> R;
    static const int PARTS = !S::WIDE && ROWS >= 64 ? 2 : 1, PART = ROWS / PARTS;
    // Slice sums, and exact sums of the group in the making, of both digits.
    float sums[PARTS][PART / 2];
    float low[PARTS][PART / 2], high[S::WIDE ? PARTS : 1][S::WIDE ? PART / 2 : 1];

    SHARED void clear() {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int i = 0; i < PART / 2; i++) sums[p][i] = 0.0f;
    }

    // Products of a part and step begin. ODD: the step's number is.
    template <int P, bool ODD>
    SHARED void begin(const StepFragments<S>& f, const uchar* stage) {
        ulong b = operand(stage + P * PART * 2 * STEP);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint add = k > 0 || (S::GROUP == 128 && ODD);
            multiply_warpgroup<PART>(low[P], f.low[k], b + 2 * k, add);
            if constexpr (S::WIDE) multiply_warpgroup<PART>(high[P], f.high[k], b + 2 * k, add);
        }
        products_commit();
    }

    // Waits for the products of part P, when LEFT groups of products may still run, and scales its group
    // sums. `floats`: sums of the rows' codes.
    template <int P, int LEFT, bool ENDS>
    SHARED void finish(const Scales& s, const float* floats) {
        float4 row_sums[PART / 16];
#pragma unroll
        for (int n = 0; n < PART / 16; n++)
            if (ENDS) row_sums[n] = *(const float4*)(floats + P * PART + 16 * n);
        products_wait<LEFT>();
        if constexpr (ENDS) scale<P>(s, row_sums);
    }

    template <int P>
    SHARED void scale(const Scales& s, const float4* row_sums) {
#pragma unroll
        for (int i = 0; i < PART / 2; i++) {
            // Not before the wait.
            asm volatile("" : "+f"(low[P][i]));
            if constexpr (S::WIDE) asm volatile("" : "+f"(high[P][i]));
        }
#pragma unroll
        for (int n = 0; n < PART / 8; n++) {
            const float4& four = row_sums[n / 2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& acc = sums[P][4 * n + i];
                float first = n % 2 ? four.z : four.x, second = n % 2 ? four.w : four.y;
                float own = i % 2 ? second : first, group = low[P][4 * n + i];
                if constexpr (S::WIDE) group = FMA(16.0f, FMA(0.5f, own, high[P][4 * n + i]), group);
                acc = FMA(group, s.scale[i / 2], acc);
                if (S::AFFINE) acc = FMA(s.bias[i / 2], own, acc);
            }
        }
    }
};

// The warp needs the stage no longer.
SHARED void give_back(ulong* empty, uint lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
}

// Waits for the ring's stage and makes the fragments of its step.
template <bool GATHERED, class S>
SHARED void take_step(StepFragments<S>& f, const Ring& ring, uint warp, uint lane) {
    barrier_wait(ring.full + ring.stage, ring.parity);
    if (GATHERED) publish_to_products();
    make_step<S>(f, ring.template at<S>(ring.stage), warp, lane);
}

// The rest of a step whose part 0 has begun. LAST: of the tile; otherwise the next one is begun.
template <bool GATHERED, bool ODD, bool LAST, class S, int ROWS>
SHARED void ring_step(Ring& ring, RingProducts<S, ROWS>& products, StepFragments<S>& own,
                      StepFragments<S>& next, uint warp, uint lane) {
    typedef RingShape<S> R;
    const int PARTS = RingProducts<S, ROWS>::PARTS;
    const bool ENDS = S::GROUP == 64 || ODD || LAST;
    const uchar* stage = ring.template at<S>(ring.stage);
    if constexpr (PARTS == 2) products.template begin<1, ODD>(own, stage);
    ring.next();
    if constexpr (!LAST) take_step<GATHERED, S>(next, ring, warp, lane);
    Scales s = load_scales<S>(stage + R::ROW_BYTES + R::CODE_BYTES + warp * S::GROUP_BYTES, 0, lane / 4);
    const float* floats = (const float*)(stage + R::SUMS_AT) + lane % 4 * 4;
    products.template finish<0, PARTS - 1, ENDS>(s, floats);
    if constexpr (!LAST) products.template begin<0, !ODD>(next, ring.template at<S>(ring.stage));
    if constexpr (PARTS == 2) products.template finish<1, LAST ? 0 : 1, ENDS>(s, floats);
}

// Adds finished slice sums to the totals, which threads keep in `totals` (shared memory), and gives the stage
// back. LAST: sums become the totals, and places of results are read.
template <bool LAST, class S, int ROWS>
SHARED void ring_slice(RingProducts<S, ROWS>& products, const Ring& ring, uint stage, float* totals,
                       bool first, uint4* places, uint lane) {
    typedef RingShape<S> R;
    const int BATCH = 4;
    const float4* units =
        (const float4*)(ring.stages + stage * R::STAGE_BYTES + R::UNITS_AT) + lane % 4;
    float4* mine = (float4*)totals + threadIdx.x;
#pragma unroll
    for (int first_tile = 0; first_tile < ROWS / 8; first_tile += BATCH) {
        // All loads before the first store.
        float4 unit[BATCH / 2], before[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int at = first_tile + n;
            if (n % 2 == 0) unit[n / 2] = units[at / 2 * 4];
            before[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!first) before[n] = mine[at * PRODUCT_THREADS];
        }
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int PART_TILES = RingProducts<S, ROWS>::PART / 8;
            int at = first_tile + n;
            float* v = products.sums[at / PART_TILES] + at % PART_TILES * 4;
            const float4& four = unit[n / 2];
            float even = n % 2 ? four.z : four.x, odd = n % 2 ? four.w : four.y;
            v[0] = before[n].x + v[0] * even, v[1] = before[n].y + v[1] * odd;
            v[2] = before[n].z + v[2] * even, v[3] = before[n].w + v[3] * odd;
            if (!LAST) mine[at * PRODUCT_THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    if (LAST && places) {
#pragma unroll
        for (int n = 0; n < ROWS / 16; n++)
            places[n] = *(const uint4*)((const uchar*)(units + n * 4) + R::SUM_BYTES);
    }
    give_back(ring.empty + stage, lane);
    if (!LAST) products.clear();
}

// Puts totals where they belong: row n of a tile of neighbours at n, of gathered rows at `places` (those of
// the lane's rows); there rows beyond the last are the last once more.
template <bool GATHERED, class S, int ROWS>
SHARED void put_totals(const RingProducts<S, ROWS>& products, const uint4* places, const TileNote& in,
                       uint warp, uint lane) {
    const int PART_TILES = RingProducts<S, ROWS>::PART / 8;
    // Made here, not kept in registers since the tile began.
    uint pair = lane % 4 * 2, output = warp * 16 + lane / 4;
    asm volatile("" : "+r"(pair), "+r"(output));
    output += in.output;
    float* to = in.out + output;
    bool low = output < in.outputs, high = output + 8 < in.outputs;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        const float* v = products.sums[n / PART_TILES] + n % PART_TILES * 4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint row = 8 * n + pair + j;
            if constexpr (GATHERED) {
                const uint4& four = places[n / 2];
                row = n % 2 ? (j ? four.w : four.z) : j ? four.y : four.x;
            } else if (row >= in.count) {
                continue;
            }
            float* at = to + (ulong)row * in.outputs;
            if (low) at[0] = v[j];
            if (high) at[8] = v[2 + j];
        }
    }
}

// The products of a tile by one of the two multiplying warpgroups.
template <bool GATHERED, class S, int ROWS>
SHARED void ring_tile(Ring& ring, float* totals, const TileNote& in, uint steps) {
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    RingProducts<S, ROWS> products;
    StepFragments<S> even, odd;
    uint4 own_places[ROWS / 16], *places = GATHERED ? own_places : nullptr;
    products.clear();
    take_step<GATHERED, S>(even, ring, warp, lane);
    products.template begin<0, false>(even, ring.template at<S>(ring.stage));
#pragma unroll 1
    for (uint step = 0;; step += 2) {
        uint stage = ring.stage;
        if (step + 1 == steps) {
            ring_step<GATHERED, false, true>(ring, products, even, odd, warp, lane);
            ring_slice<true>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
            break;
        }
        ring_step<GATHERED, false, false>(ring, products, even, odd, warp, lane);
        give_back(ring.empty + stage, lane);
        stage = ring.stage;
        if (step + 2 == steps) {
            ring_step<GATHERED, true, true>(ring, products, odd, even, warp, lane);
            ring_slice<true>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
            break;
        }
        ring_step<GATHERED, true, false>(ring, products, odd, even, warp, lane);
        if ((step + 2) % SLICE_STEPS == 0)
            ring_slice<false>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
        else
            give_back(ring.empty + stage, lane);
    }
    put_totals<GATHERED>(products, places, in, warp, lane);
}

// A tile without outputs for this warpgroup.
SHARED void skip_tile(Ring& ring, uint steps) {
    for (uint step = 0; step < steps; step++) {
        barrier_wait(ring.full + ring.stage, ring.parity);
        give_back(ring.empty + ring.stage, threadIdx.x % 32);
        ring.next();
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

// All of a block's tiles.
template <class Tiles>
SHARED void run_ring(uchar* dynamic, const Tiles& tiles) {
    typedef typename Tiles::Stored S;
    uchar* smem = dynamic + (1024 - (uint)__cvta_generic_to_shared(dynamic) % 1024) % 1024;
    Ring ring(smem);
    ring.init(threadIdx.x, StageCopies<S, Tiles::GATHERED>::Type::REPORTS);
    if (threadIdx.x >= PRODUCT_THREADS) {
        fewer_registers<FILL_REGISTERS>();
        fill_ring(ring, tiles);
    } else {
        more_registers<PRODUCT_REGISTERS>();
        float* totals = (float*)(ring.stages + STAGES * RingShape<S>::STAGE_BYTES);
        uint first = __shfl_sync(0xffffffffu, threadIdx.x / 128 * 64, 0);
        for (TileNote in = ring.read_note(); in.count > 0; in = ring.read_note()) {
            with_rows<RingShape<S>::ROWS>(in.count, [&](auto rows) {
                const int ROWS = decltype(rows)::COUNT;
                if (in.output + first >= in.outputs)
                    skip_tile(ring, tiles.cols() / STEP);
                else
                    ring_tile<Tiles::GATHERED, S, ROWS>(ring, totals, in, tiles.cols() / STEP);
            });
        }
    }
}
