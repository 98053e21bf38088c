// Prompt tiles on Hopper: 128 outputs by up to 128 rows of a grouped matrix of up to 4 bits in groups of 64
// or 128, or by up to 64 rows of one of two digits in groups of 64. Two warpgroups multiply, 64 outputs each:
// weights out of registers, rows of codes out of a ring of steps in shared memory that a third warpgroup
// fills by the copy engine. Each works on two halves of the rows in turn: while the group sums of one are
// scaled, the products of the other run. Copies report to the barriers by themselves, so that as many steps
// as there are stages are on their way.
//
// Rows come aligned (align.cu): codes of a row and slice share one unit, so that groups are scaled by
// acc = fma(I, s, acc), then fma(b', csum, acc), and the unit, a power of two, is put on the slice sum: the
// same bits as long as nothing underflows, which matrices with scales and biases of ordinary size grant
// (packing.rs). Two digits: I = 16 (I1 + csum / 2) + I0, where the sum of (w1 + 1/2) code stays below 2^23
// and is exact.
#pragma once
#include "aligned.cuh"
#include "linear.cuh"
#include "warpgroup.cuh"

#define TILE_OUTPUTS 128
#define PRODUCT_THREADS 256
#define TILE_THREADS 384
#define FILL_WARPS 4
// Steps that gathered rows are on their way before the ring is told.
#define GATHER_STEPS 3
// From this many rows on, products have two parts.
#define SPLIT_ROWS 64
// Registers of a thread that fills and of one that multiplies: 64 Ki for the block.
#define FILL_REGISTERS 56
#define PRODUCT_REGISTERS 224

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
    // Of gathered rows.
    SHARED uint row(uint n) const { return index[n] / divisor; }
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
    template <bool GATHERED>
    SHARED void init(uint thread) {
        if (thread < STAGES) {
            barrier_init(full + thread, GATHERED ? 2 * FILL_WARPS : FILL_WARPS);
            barrier_init(empty + thread, PRODUCT_THREADS / 32);
        }
        if (thread < NOTES) barrier_init(noted + thread, 1);
        barriers_made();
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

// A warp's part in what the copy engine brings: two of the tile's eight tiles of outputs, and where rows are
// neighbours a quarter of them and their sums (warp 0) or units (warp 1).
template <class S>
struct Filler {
    typedef RingShape<S> R;
    static const uint GROUP_STEPS = S::GROUP / STEP, STEP_BYTES = S::STEP_WORDS * 4;
    uint warp, lane, stride, quarter;
    const uchar *codes[2], *params[2], *rows, *floats;

    SHARED void start(const RingTile& in, uint tile_rows) {
        uint steps = in.cols / STEP, groups = in.cols / S::GROUP, tiles = (in.outputs + 15) / 16;
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            ulong own = min(in.tile + 2 * warp + j, tiles - 1);
            codes[j] = (const uchar*)in.weights.codes + own * steps * STEP_BYTES;
            params[j] = in.weights.params + own * groups * S::GROUP_BYTES;
        }
        // A multiple of 8.
        quarter = tile_rows / FILL_WARPS, stride = in.rows.stride;
        rows = in.rows.codes + (in.first + warp * quarter) * 128ul;
        floats = (const uchar*)((warp == 0 ? in.rows.sums : in.rows.units) + in.first);
    }

    // One lane.
    template <bool GATHERED>
    SHARED void copy(uchar* stage, ulong* full, bool group_ends, bool slice_ends) {
        bool with_floats = !GATHERED && (warp == 0 ? group_ends : warp == 1 && slice_ends);
        uint bytes = 2 * STEP_BYTES + (group_ends ? 2 * S::GROUP_BYTES : 0);
        if (!GATHERED) bytes += quarter * 128;
        if (with_floats) bytes += FILL_WARPS * quarter * 4;
        barrier_expect(full, bytes);
        if (!GATHERED) copy_bulk(stage + warp * quarter * 128, rows, quarter * 128, full);
        rows += stride * 128ul;
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            copy_bulk(stage + R::ROW_BYTES + (2 * warp + j) * STEP_BYTES, codes[j], STEP_BYTES, full);
            codes[j] += STEP_BYTES;
            if (!group_ends) continue;
            uchar* to = stage + R::ROW_BYTES + R::CODE_BYTES + (2 * warp + j) * S::GROUP_BYTES;
            copy_bulk(to, params[j], S::GROUP_BYTES, full);
            params[j] += S::GROUP_BYTES;
        }
        if (!with_floats) return;
        copy_bulk(stage + (warp == 0 ? R::SUMS_AT : R::UNITS_AT), floats, FILL_WARPS * quarter * 4, full);
        floats += stride * 4ul;
    }
};

// A thread's part in gathering rows that lie anywhere: chunk t % 8 of rows t / 8, t / 8 + 16, ..., floats of
// row t.
template <class S, int ROWS>
struct Gatherer {
    typedef RingShape<S> R;
    // In 16 bytes.
    uint from[ROWS / 16], row_place;
    const uchar* rows;
    const float *sums, *units;
    const uint* place;

    SHARED Gatherer(const RingTile& in, uint t) {
        rows = in.rows.codes;
        uint key = t % 8 ^ t / 8 % 8;
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++)
            from[j] = chunk_place(in.row(min(t / 8 + 16 * j, in.count - 1)), key) / 16;
        row_place = float_place(in.row(min(t, in.count - 1)));
        sums = in.rows.sums + row_place, units = in.rows.units + row_place;
        place = in.index + min(t, in.count - 1);
    }
    SHARED void copy(const RingTile& in, uchar* stage, uint t, bool group_ends, bool slice_ends, bool last) {
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++)
            copy_async_16(stage + (t + 128 * j) * 16, rows + (ulong)from[j] * 16);
        rows += in.rows.stride * 128;
        uint to = float_place(t) * 4;
        if (t < ROWS) {
            if (group_ends) copy_async_4(stage + R::SUMS_AT + to, sums);
            if (slice_ends) copy_async_4(stage + R::UNITS_AT + to, units);
            if (last) copy_async_4(stage + R::PLACES_AT + to, place);
        }
        if (group_ends) sums += in.rows.stride;
        if (slice_ends) units += in.rows.stride;
    }
};

// Rows that the copy engine brings.
struct NoGatherer {
    SHARED NoGatherer(const RingTile&, uint) {}
    SHARED void copy(const RingTile&, uchar*, uint, bool, bool, bool) {}
};
template <class S, int ROWS, bool GATHERED>
struct GathererOf {
    typedef NoGatherer Type;
};
template <class S, int ROWS>
struct GathererOf<S, ROWS, true> {
    typedef Gatherer<S, ROWS> Type;
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

// Tells the ring of gathered rows that are there, GATHER_STEPS steps after their copies began.
struct Reports {
    uint stage, pending;

    template <int LEFT>
    SHARED void tell(const Ring& ring, uint lane) {
        copy_async_wait<LEFT>();
        publish_to_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full + stage);
        if (++stage == STAGES) stage = 0;
        pending--;
    }
    SHARED void step(const Ring& ring, uint lane) {
        copy_async_commit();
        if (++pending > GATHER_STEPS) tell<GATHER_STEPS>(ring, lane);
    }
    SHARED void rest(const Ring& ring, uint lane) {
        while (pending > 0) tell<0>(ring, lane);
    }
};

// Fills the ring with the steps of a tile.
template <class S, bool GATHERED, int ROWS>
SHARED void fill_tile(Ring& ring, Filler<S>& filler, Reports& reports, const RingTile& in) {
    uint steps = in.cols / STEP, t = filler.warp * 32 + filler.lane;
    filler.start(in, ROWS);
    typename GathererOf<S, ROWS, GATHERED>::Type gatherer(in, t);
#pragma unroll 1
    for (uint step = 0; step < steps; step++) {
        bool last = step + 1 == steps, group_ends = last || (step + 1) % Filler<S>::GROUP_STEPS == 0;
        bool slice_ends = last || (step + 1) % SLICE_STEPS == 0;
        barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
        uchar* stage = ring.stages + ring.stage * RingShape<S>::STAGE_BYTES;
        if (filler.lane == 0)
            filler.template copy<GATHERED>(stage, ring.full + ring.stage, group_ends, slice_ends);
        gatherer.copy(in, stage, t, group_ends, slice_ends, last);
        if (GATHERED) reports.step(ring, filler.lane);
        ring.next();
    }
}

// All of a block's tiles. `Tiles`: kind of matrix `Stored`, whether rows are GATHERED, inputs `cols()`,
// `count()` and `tile(n)`.
template <class Tiles>
SHARED void fill_ring(Ring& ring, const Tiles& tiles) {
    typedef typename Tiles::Stored S;
    uint thread = threadIdx.x - PRODUCT_THREADS;
    Filler<S> filler;
    filler.warp = thread / 32, filler.lane = thread % 32;
    Reports reports = {0, 0};
    for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
        RingTile in = tiles.tile(n);
        if (thread == 0)
            ring.write_note(
                TileNote{in.out, in.count, in.tile * 16, in.outputs, in.index != nullptr, {0, 0}});
        with_rows<RingShape<S>::ROWS>(in.count, [&](auto rows) {
            fill_tile<S, Tiles::GATHERED, decltype(rows)::COUNT>(ring, filler, reports, in);
        });
    }
    if (Tiles::GATHERED) reports.rest(ring, filler.lane);
}

template <class Tiles>
SHARED void run_ring(uchar* dynamic, const Tiles& tiles) {
    typedef typename Tiles::Stored S;
    uchar* smem = dynamic + (1024 - (uint)__cvta_generic_to_shared(dynamic) % 1024) % 1024;
    Ring ring(smem);
    ring.init<Tiles::GATHERED>(threadIdx.x);
    if (threadIdx.x >= PRODUCT_THREADS) {
        fewer_registers<FILL_REGISTERS>();
        fill_ring(ring, tiles);
    } else {
        more_registers<PRODUCT_REGISTERS>();
        float* totals = (float*)(ring.stages + STAGES * RingShape<S>::STAGE_BYTES);
        for (uint n = blockIdx.x; n < tiles.count(); n += gridDim.x) {
            TileNote in = ring.read_note();
            with_rows<RingShape<S>::ROWS>(in.count, [&](auto rows) {
                ring_tile<S, decltype(rows)::COUNT>(ring, totals, in, tiles.cols() / STEP);
            });
        }
    }
}
