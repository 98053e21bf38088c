// Prompt tiles on Hopper: 128 outputs by up to 128 rows of a grouped matrix of up to 4 bits in groups of 64
// or 128, or by up to 64 rows of one of two digits in groups of 64. Two warpgroups multiply, 64 outputs each:
// weights out of registers, rows of codes out of a ring of steps in shared memory that a third warpgroup
// fills. Each works on two halves of the rows in turn: while the group sums of one are scaled, the products
// of the other run. Copies report to the barriers by themselves, so that as many steps as there are stages
// are on their way.
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
// From this many rows on, products have two parts.
#define SPLIT_ROWS 64
// Registers of a thread that fills and of one that multiplies: 64 Ki for the block.
#define FILL_REGISTERS 56
#define PRODUCT_REGISTERS 224

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
    // Places of results are there in a tile's last step, units in a slice's.
    static const int SUMS_AT = ROW_BYTES + CODE_BYTES + PARAM_BYTES, UNITS_AT = SUMS_AT + SUM_BYTES;
    static const int PLACES_AT = UNITS_AT + SUM_BYTES;
    static const int STAGE_BYTES = (PLACES_AT + SUM_BYTES + 1023) / 1024 * 1024;
};

// What a tile multiplies: `count` rows (row n is `index[n] / divisor`, or first + n) of `cols` inputs by the
// outputs 16 tile .. + 127 of `tiles` tiles. Results of row n go to row `index[n]` of `out`, or n.
struct RingTile {
    Packed weights;
    AlignedRows rows;
    const uint* index;
    uint divisor, first, count, cols, tile, outputs;
    float* out;
    SHARED uint row(uint n) const { return index ? index[n] / divisor : first + n; }
};

// What those who multiply have to know of a tile, so that they need not look it up.
struct TileNote {
    float* out;
    uint count, output, outputs, indexed, unused[2];
};
// A note more than stages: who fills is at most so many steps, and tiles, ahead.
#define NOTES (STAGES + 1)

// The ring: STAGES stages and two barriers for each; notes of tiles and a barrier for each. Goes through the
// steps of all tiles of the block.
struct Ring {
    uchar* stages;
    ulong* full;
    ulong* empty;
    ulong* noted;
    TileNote* notes;
    uint stage, parity, note, note_parity;

    SHARED Ring(uchar* smem) {
        full = (ulong*)smem;
        empty = full + STAGES;
        noted = empty + STAGES;
        notes = (TileNote*)(smem + 512);
        stages = smem + 1024;
        stage = 0, parity = 0, note = 0, note_parity = 0;
    }
    SHARED void init(uint thread) {
        if (thread < STAGES) {
            barrier_init(full + thread, 128);
            barrier_init(empty + thread, PRODUCT_THREADS / 32);
        }
        if (thread < NOTES) barrier_init(noted + thread, 1);
        __syncthreads();
    }
    SHARED void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // One thread writes notes, those who multiply read them.
    SHARED void write_note(const TileNote& tile) {
        notes[note] = tile;
        barrier_arrive(noted + note);
        if (++note == NOTES) note = 0;
    }
    SHARED TileNote read_note() {
        barrier_wait(noted + note, note_parity);
        TileNote tile = notes[note];
        if (++note == NOTES) note = 0, note_parity ^= 1;
        return tile;
    }
};

// Where row n's float of a stage lies: those of a lane's four rows of two row tiles are neighbours.
SHARED uint float_place(uint n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; }

// The thread's part in filling the ring.
template <class S>
struct Filler {
    typedef RingShape<S> R;
    static const uint CHUNKS = 8 * S::BITS, PARAM_CHUNKS = S::GROUP_BYTES / 16;
    static const int CODE_COPIES = (8 * CHUNKS + 127) / 128;

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
        uint to_row = t / 8 * 128 + (t % 8 ^ t / 8 % 8) * 16, to_float = float_place(t) * 4;
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
                copy_async_4(stage + R::SUMS_AT + to_float, sums);
                if ((step + 1) % SLICE_STEPS == 0 || step + 1 == steps)
                    copy_async_4(stage + R::UNITS_AT + to_float, units + step / SLICE_STEPS);
                if (in.index && step + 1 == steps)
                    copy_async_4(stage + R::PLACES_AT + to_float, in.index + min(t, in.count - 1));
            }
            if (S::GROUP == 64 || step % 2 == 1) params += S::GROUP_BYTES, sums++;
            copy_async_report(ring.full + ring.stage);
            ring.next();
        }
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

// The products of a warpgroup: 64 outputs by ROWS rows, in PARTS parts along the rows. Values of a part:
// [4 j + i] as in `multiply_warpgroup`.
template <class S, int ROWS>
struct RingProducts {
    typedef RingShape<S> R;
    static const int PARTS = !S::WIDE && ROWS >= SPLIT_ROWS ? 2 : 1, PART = ROWS / PARTS;
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
                if constexpr (S::WIDE)
                    group = FMA(16.0f, FMA(0.5f, own, high[P][4 * n + i]), group);
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
template <class S>
SHARED void take_step(StepFragments<S>& f, const Ring& ring, uint warp, uint lane) {
    barrier_wait(ring.full + ring.stage, ring.parity);
    publish_to_products();
    make_step<S>(f, ring.stages + ring.stage * RingShape<S>::STAGE_BYTES, warp, lane);
}

// The rest of a step whose part 0 has begun. LAST: of the tile; otherwise the next one is begun.
template <bool ODD, bool LAST, class S, int ROWS>
SHARED void ring_step(Ring& ring, RingProducts<S, ROWS>& products, StepFragments<S>& own,
                      StepFragments<S>& next, uint warp, uint lane) {
    typedef RingShape<S> R;
    const int PARTS = RingProducts<S, ROWS>::PARTS;
    const bool ENDS = S::GROUP == 64 || ODD || LAST;
    const uchar* stage = ring.stages + ring.stage * R::STAGE_BYTES;
    if constexpr (PARTS == 2) products.template begin<1, ODD>(own, stage);
    ring.next();
    if constexpr (!LAST) take_step<S>(next, ring, warp, lane);
    Scales s = load_scales<S>(stage + R::ROW_BYTES + R::CODE_BYTES + warp * S::GROUP_BYTES, 0, lane / 4);
    const float* floats = (const float*)(stage + R::SUMS_AT) + lane % 4 * 4;
    products.template finish<0, PARTS - 1, ENDS>(s, floats);
    if constexpr (!LAST) products.template begin<0, !ODD>(next, ring.stages + ring.stage * R::STAGE_BYTES);
    if constexpr (PARTS == 2) products.template finish<1, LAST ? 0 : 1, ENDS>(s, floats);
}

// Adds finished slice sums to the totals, which threads keep in `totals` (shared memory, 64 KiB), reads
// places of results at the tile's end, and gives the stage back.
template <bool LAST, class S, int ROWS>
SHARED void ring_slice(RingProducts<S, ROWS>& products, const Ring& ring, uint stage, float* totals,
                       bool first, uint2* places, uint lane) {
    typedef RingShape<S> R;
    const int PART_TILES = RingProducts<S, ROWS>::PART / 8;
    const float* units =
        (const float*)(ring.stages + stage * R::STAGE_BYTES + R::UNITS_AT) + lane % 4 * 4;
    float4* mine = (float4*)totals + threadIdx.x;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        float2 unit = *(const float2*)(units + n / 2 * 16 + n % 2 * 2);
        float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : mine[n * PRODUCT_THREADS];
        float* v = products.sums[n / PART_TILES] + n % PART_TILES * 4;
        v[0] = before.x + v[0] * unit.x, v[1] = before.y + v[1] * unit.y;
        v[2] = before.z + v[2] * unit.x, v[3] = before.w + v[3] * unit.y;
        if (!LAST) mine[n * PRODUCT_THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        if (LAST) places[n] = *(const uint2*)((const uchar*)(units + n / 2 * 16 + n % 2 * 2) + R::SUM_BYTES);
    }
    give_back(ring.empty + stage, lane);
    if (!LAST) products.clear();
}

// Puts totals where they belong. `places`: those of the lane's rows.
template <class S, int ROWS>
SHARED void put_totals(const RingProducts<S, ROWS>& products, const uint2* places, const TileNote& in,
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
            uint row = 8 * n + pair + j, place = in.indexed ? (j ? places[n].y : places[n].x) : row;
            float* at = to + (ulong)place * in.outputs;
            if (low && row < in.count) at[0] = v[j];
            if (high && row < in.count) at[8] = v[2 + j];
        }
    }
}

// The products of a tile by the two multiplying warpgroups.
template <class S, int ROWS>
SHARED void ring_tile(Ring& ring, float* totals, const TileNote& in, uint steps) {
    typedef RingShape<S> R;
    uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    RingProducts<S, ROWS> products;
    StepFragments<S> even, odd;
    uint2 places[ROWS / 8];
    products.clear();
    take_step<S>(even, ring, warp, lane);
    products.template begin<0, false>(even, ring.stages + ring.stage * R::STAGE_BYTES);
#pragma unroll 1
    for (uint step = 0;; step += 2) {
        uint stage = ring.stage;
        if (step + 1 == steps) {
            ring_step<false, true>(ring, products, even, odd, warp, lane);
            ring_slice<true>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
            break;
        }
        ring_step<false, false>(ring, products, even, odd, warp, lane);
        give_back(ring.empty + stage, lane);
        stage = ring.stage;
        if (step + 2 == steps) {
            ring_step<true, true>(ring, products, odd, even, warp, lane);
            ring_slice<true>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
            break;
        }
        ring_step<true, false>(ring, products, odd, even, warp, lane);
        if ((step + 2) % SLICE_STEPS == 0)
            ring_slice<false>(products, ring, stage, totals, step < SLICE_STEPS, places, lane);
        else
            give_back(ring.empty + stage, lane);
    }
    put_totals(products, places, in, warp, lane);
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

// All of a block's tiles. `Tiles`: kind of matrix `Stored`, inputs `cols()`, `count()` and `tile(n)`.
template <class Tiles>
SHARED void run_ring(uchar* dynamic, const Tiles& tiles) {
    uchar* smem = dynamic + (1024 - (uint)__cvta_generic_to_shared(dynamic) % 1024) % 1024;
    Ring ring(smem);
    ring.init(threadIdx.x);
    const int MOST = RingShape<typename Tiles::Stored>::ROWS;
    if (threadIdx.x >= PRODUCT_THREADS) {
        fewer_registers<FILL_REGISTERS>();
        Filler<typename Tiles::Stored> filler;
        uint thread = threadIdx.x - PRODUCT_THREADS;
        for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
            RingTile in = tiles.tile(n);
            if (thread == 0)
                ring.write_note(
                    TileNote{in.out, in.count, in.tile * 16, in.outputs, in.index != nullptr, {0, 0}});
            with_rows<MOST>(in.count, [&](auto rows) {
                filler.template tile<decltype(rows)::COUNT>(ring, in, thread);
            });
        }
    } else {
        more_registers<PRODUCT_REGISTERS>();
        float* totals = (float*)(ring.stages + STAGES * RingShape<typename Tiles::Stored>::STAGE_BYTES);
        for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
            TileNote in = ring.read_note();
            with_rows<MOST>(in.count, [&](auto rows) {
                const int ROWS = decltype(rows)::COUNT;
                ring_tile<typename Tiles::Stored, ROWS>(ring, totals, in, tiles.cols() / STEP);
            });
        }
    }
}
