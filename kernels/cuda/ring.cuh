// The ring of steps that feeds the prompt tiles of Hopper (linear_warpgroup.cuh): stages in shared memory,
// each with rows of codes, weights and scales of 64 inputs. One warpgroup fills it; rows that are neighbours
// the copy engine brings. As many steps as there are stages are on their way.
#pragma once
#include "aligned.cuh"
#include "linear.cuh"
#include "warpgroup.cuh"

#define TILE_OUTPUTS 128
#define PRODUCT_THREADS 256
#define TILE_THREADS 384
#define FILL_THREADS 128
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
// outputs 16 tile .. + 127. Results of row n go to row `index[n]` of `out`, or n.
struct RingTile {
    Packed weights;
    AlignedRows rows;
    const uint* index;
    uint divisor, first, count, cols, tile, outputs;
    float* out;

    // Of gathered rows.
    SHARED uint row(uint n) const { return index[n] / divisor; }
    // Rows that are brought.
    SHARED uint rows_brought() const { return (count + 31) / 32 * 32; }
};

// What those who multiply have to know of a tile, so that they need not look it up, and the tile's number.
// After the last tile comes one without rows.
struct TileNote {
    float* out;
    uint count, output, outputs, tile, unused[2];
};
// A note more than stages: who writes them is at most so many steps, and tiles, ahead.
#define NOTES (STAGES + 1)

// The ring: STAGES stages and two barriers for each; notes of tiles and a barrier for each. Goes through
// the steps of all tiles of the block.
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
        notes = (TileNote*)(smem + 256);
        stages = smem + 1024;
        stage = 0, parity = 0, note = 0, note_parity = 0;
    }
    // `reports`: of those who fill a stage.
    SHARED void init(uint thread, uint reports) {
        if (thread < STAGES) {
            barrier_init(full + thread, reports);
            barrier_init(empty + thread, PRODUCT_THREADS / 32);
        }
        if (thread < NOTES) barrier_init(noted + thread, 1);
        barriers_made();
        __syncthreads();
    }
    template <class S>
    SHARED uchar* at(uint which) const {
        return stages + which * RingShape<S>::STAGE_BYTES;
    }
    SHARED void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // One thread writes notes, the others read them.
    SHARED void write_note(const TileNote& tile) {
        notes[note] = tile;
        barrier_arrive(noted + note);
    }
    SHARED void next_note() {
        if (++note == NOTES) note = 0, note_parity ^= 1;
    }
    SHARED TileNote read_note() {
        barrier_wait(noted + note, note_parity);
        TileNote tile = notes[note];
        next_note();
        return tile;
    }
};

// Which of a tile's steps end a group, a slice and the tile.
struct StepEnds {
    bool group, slice, tile;
    SHARED StepEnds(uint step, uint steps, uint group_steps) {
        tile = step + 1 == steps;
        group = tile || (step + 1) % group_steps == 0;
        slice = tile || (step + 1) % SLICE_STEPS == 0;
    }
};

// A thread's part in bringing weights and scales. Those are read as usual, so that usual copies do, of which the
// copy engine would need one for each of the eight tiles of outputs.
template <class S>
struct WeightCopies {
    typedef RingShape<S> R;
    static const uint CHUNKS = 8 * S::BITS, PARAM_CHUNKS = S::GROUP_BYTES / 16;
    static const int COPIES = (8 * CHUNKS + FILL_THREADS - 1) / FILL_THREADS;
    const uchar *codes[COPIES], *params;

    SHARED void start(const RingTile& in, uint t) {
        uint steps = in.cols / STEP, groups = in.cols / S::GROUP, tiles = (in.outputs + 15) / 16;
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            uint i = t + FILL_THREADS * j;
            ulong own = min(in.tile + i / CHUNKS, tiles - 1);
            codes[j] = (const uchar*)(in.weights.codes + own * steps * S::STEP_WORDS) + i % CHUNKS * 16;
        }
        ulong own = min(in.tile + t / PARAM_CHUNKS, tiles - 1);
        params = in.weights.params + own * groups * S::GROUP_BYTES + t % PARAM_CHUNKS * 16;
    }
    SHARED void copy(uchar* stage, uint t, const StepEnds& ends) {
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            if (8 * CHUNKS % FILL_THREADS == 0 || t + FILL_THREADS * j < 8 * CHUNKS)
                copy_async_16(stage + R::ROW_BYTES + (t + FILL_THREADS * j) * 16, codes[j]);
            codes[j] += S::STEP_WORDS * 4;
        }
        if (!ends.group) return;
        if (t < 8 * PARAM_CHUNKS) copy_async_16(stage + R::ROW_BYTES + R::CODE_BYTES + t * 16, params);
        params += S::GROUP_BYTES;
    }
};

// Rows that are neighbours, by the copy engine.
template <class S>
struct NeighbourRows {
    typedef RingShape<S> R;
    static const uint REPORTS = FILL_THREADS + 1;
    uint stride, brought;
    const uchar *rows, *sums, *units;

    SHARED void start(const RingTile& in, uint) {
        stride = in.rows.stride, brought = in.rows_brought();
        rows = in.rows.codes + in.first * 128ul;
        sums = (const uchar*)(in.rows.sums + in.first), units = (const uchar*)(in.rows.units + in.first);
    }
    SHARED void copy(const RingTile&, uchar* stage, ulong* full, uint t, const StepEnds& ends) {
        if (t < 32) {
            barrier_expect(full, brought * (128 + (ends.group ? 4 : 0) + (ends.slice ? 4 : 0)));
            copy_bulk(stage, rows, brought * 128, full);
            if (ends.group) copy_bulk(stage + R::SUMS_AT, sums, brought * 4, full);
            if (ends.slice) copy_bulk(stage + R::UNITS_AT, units, brought * 4, full);
        }
        rows += stride * 128ul;
        if (ends.group) sums += stride * 4ul;
        if (ends.slice) units += stride * 4ul;
    }
};

// A thread's part in gathering rows that lie anywhere: chunk t % 8 of rows t / 8, t / 8 + 16, ..., floats of
// row t. Rows beyond the last are the last once more. Products may read them after `publish_to_products`.
template <class S>
struct GatheredRows {
    typedef RingShape<S> R;
    static const uint REPORTS = FILL_THREADS;
    uint brought, from[R::ROWS / 16], place;
    const uchar* rows;
    const float *sums, *units;

    SHARED void start(const RingTile& in, uint t) {
        brought = in.rows_brought();
        rows = in.rows.codes, sums = in.rows.sums, units = in.rows.units;
#pragma unroll
        for (int j = 0; j < R::ROWS / 16; j++)
            from[j] = chunk_place(in.row(min(t / 8 + 16 * j, in.count - 1)), t % 8 ^ t / 8 % 8);
        place = float_place(in.row(min(t, in.count - 1)));
    }
    SHARED void copy(const RingTile& in, uchar* stage, ulong*, uint t, const StepEnds& ends) {
#pragma unroll
        for (int j = 0; j < R::ROWS / 16; j++)
            if (16 * j < brought) copy_async_16(stage + (t + FILL_THREADS * j) * 16, rows + from[j]);
        rows += in.rows.stride * 128;
        if (t < brought) {
            uchar* to = stage + float_place(t) * 4;
            if (ends.group) copy_async_4(to + R::SUMS_AT, sums + place);
            if (ends.slice) copy_async_4(to + R::UNITS_AT, units + place);
            if (ends.tile) copy_async_4(to + R::PLACES_AT, in.index + min(t, in.count - 1));
        }
        if (ends.group) sums += in.rows.stride;
        if (ends.slice) units += in.rows.stride;
    }
};

template <class S, bool GATHERED>
struct RowCopies {
    typedef NeighbourRows<S> Type;
};
template <class S>
struct RowCopies<S, true> {
    typedef GatheredRows<S> Type;
};

// A thread's part in the steps of a tile.
template <class S, bool GATHERED>
SHARED void fill_tile(Ring& ring, const RingTile& in, uint t) {
    WeightCopies<S> weights;
    typename RowCopies<S, GATHERED>::Type rows;
    weights.start(in, t), rows.start(in, t);
    uint steps = in.cols / STEP;
#pragma unroll 1
    for (uint step = 0; step < steps; step++) {
        StepEnds ends(step, steps, S::GROUP / STEP);
        ulong* full = ring.full + ring.stage;
        uchar* stage = ring.template at<S>(ring.stage);
        barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
        rows.copy(in, stage, full, t, ends);
        weights.copy(stage, t, ends);
        copy_async_report(full);
        ring.next();
    }
}

// All of a block's tiles. `Tiles`: kind of matrix `Stored`, whether rows are GATHERED, inputs `cols()`,
// `count()`, `tile(n)` and, for one warp, the tile after the n-th, `after(n)`.
template <class Tiles>
SHARED void fill_ring(Ring& ring, const Tiles& tiles) {
    typedef typename Tiles::Stored S;
    uint t = threadIdx.x - PRODUCT_THREADS;
    uint warp = __shfl_sync(0xffffffffu, t / 32, 0);
    if (warp > 0) {
        for (TileNote note = ring.read_note(); note.count > 0; note = ring.read_note())
            fill_tile<S, Tiles::GATHERED>(ring, tiles.tile(note.tile), t);
        return;
    }
    for (uint n = blockIdx.x; n < tiles.count();) {
        RingTile in = tiles.tile(n);
        if (t == 0) ring.write_note(TileNote{in.out, in.count, in.tile * 16, in.outputs, n, {0, 0}});
        ring.next_note();
        n = tiles.after(n);
        fill_tile<S, Tiles::GATHERED>(ring, in, t);
    }
    if (t == 0) ring.write_note(TileNote{nullptr, 0, 0, 0, 0, {0, 0}});
}
