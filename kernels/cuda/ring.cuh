// The ring of steps that feeds the prompt tiles of Hopper (linear_warpgroup.cuh): stages in shared memory,
// each with rows of codes, weights and scales of 64 inputs. One warpgroup fills it, by the copy engine where
// rows are neighbours. Copies report to the barriers by themselves, so that as many steps as there are stages
// are on their way.
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

// Where rows are neighbours, the copy engine brings all: a warp two of the tile's eight tiles of outputs, a
// quarter of the rows, and the rows' sums (warp 0) or units (warp 1).
template <class S>
struct EngineCopies {
    typedef RingShape<S> R;
    static const uint WARPS = FILL_THREADS / 32, REPORTS = WARPS, STEP_BYTES = S::STEP_WORDS * 4;
    uint warp, stride, quarter;
    const uchar *codes[2], *params[2], *rows, *floats;

    SHARED void start(const RingTile& in, uint t) {
        warp = __shfl_sync(0xffffffffu, t / 32, 0);
        uint steps = in.cols / STEP, groups = in.cols / S::GROUP, tiles = (in.outputs + 15) / 16;
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            ulong own = min(in.tile + 2 * warp + j, tiles - 1);
            codes[j] = (const uchar*)in.weights.codes + own * steps * STEP_BYTES;
            params[j] = in.weights.params + own * groups * S::GROUP_BYTES;
        }
        // A multiple of 8.
        quarter = in.rows_brought() / WARPS, stride = in.rows.stride;
        rows = in.rows.codes + (in.first + warp * quarter) * 128ul;
        floats = (const uchar*)((warp == 0 ? in.rows.sums : in.rows.units) + in.first);
    }
    SHARED void copy(const RingTile&, uchar* stage, ulong* full, const StepEnds& ends) {
        bool with_floats = warp == 0 ? ends.group : warp == 1 && ends.slice;
        barrier_expect(full, quarter * 128 + 2 * (STEP_BYTES + (ends.group ? S::GROUP_BYTES : 0)) +
                                 (with_floats ? WARPS * quarter * 4 : 0));
        copy_bulk(stage + warp * quarter * 128, rows, quarter * 128, full);
        rows += stride * 128ul;
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            copy_bulk(stage + R::ROW_BYTES + (2 * warp + j) * STEP_BYTES, codes[j], STEP_BYTES, full);
            codes[j] += STEP_BYTES;
            if (!ends.group) continue;
            uchar* to = stage + R::ROW_BYTES + R::CODE_BYTES + (2 * warp + j) * S::GROUP_BYTES;
            copy_bulk(to, params[j], S::GROUP_BYTES, full);
            params[j] += S::GROUP_BYTES;
        }
        if (!with_floats) return;
        uint to = warp == 0 ? (uint)R::SUMS_AT : (uint)R::UNITS_AT;
        copy_bulk(stage + to, floats, WARPS * quarter * 4, full);
        floats += stride * 4ul;
    }
};

// A thread's part in usual copies, where rows lie anywhere: of weights and scales; chunk t % 8 of rows t / 8,
// t / 8 + 16, ...; floats of row t. Rows beyond the last are the last once more. Products may read the rows
// after `publish_to_products`.
template <class S>
struct ThreadCopies {
    typedef RingShape<S> R;
    static const uint REPORTS = FILL_THREADS, CHUNKS = 8 * S::BITS, PARAM_CHUNKS = S::GROUP_BYTES / 16;
    static const int COPIES = (8 * CHUNKS + FILL_THREADS - 1) / FILL_THREADS;
    uint t, brought, from[R::ROWS / 16], place;
    const uchar *codes[COPIES], *params, *rows;
    const float *sums, *units;

    SHARED void start(const RingTile& in, uint thread) {
        t = thread, brought = in.rows_brought();
        uint steps = in.cols / STEP, groups = in.cols / S::GROUP, tiles = (in.outputs + 15) / 16;
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            uint i = t + FILL_THREADS * j;
            ulong own = min(in.tile + i / CHUNKS, tiles - 1);
            codes[j] = (const uchar*)(in.weights.codes + own * steps * S::STEP_WORDS) + i % CHUNKS * 16;
        }
        ulong own = min(in.tile + t / PARAM_CHUNKS, tiles - 1);
        params = in.weights.params + own * groups * S::GROUP_BYTES + t % PARAM_CHUNKS * 16;
        rows = in.rows.codes, sums = in.rows.sums, units = in.rows.units;
#pragma unroll
        for (int j = 0; j < R::ROWS / 16; j++)
            from[j] = chunk_place(in.row(min(t / 8 + 16 * j, in.count - 1)), t % 8 ^ t / 8 % 8);
        place = float_place(in.row(min(t, in.count - 1)));
    }
    SHARED void copy_rows(const RingTile& in, uchar* stage, const StepEnds& ends) {
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
    SHARED void copy(const RingTile& in, uchar* stage, ulong* full, const StepEnds& ends) {
        copy_rows(in, stage, ends);
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            if (8 * CHUNKS % FILL_THREADS == 0 || t + FILL_THREADS * j < 8 * CHUNKS)
                copy_async_16(stage + R::ROW_BYTES + (t + FILL_THREADS * j) * 16, codes[j]);
            codes[j] += S::STEP_WORDS * 4;
        }
        if (ends.group) {
            if (t < 8 * PARAM_CHUNKS) copy_async_16(stage + R::ROW_BYTES + R::CODE_BYTES + t * 16, params);
            params += S::GROUP_BYTES;
        }
        copy_async_report(full);
    }
};

template <class S, bool GATHERED>
struct StageCopies {
    typedef EngineCopies<S> Type;
};
template <class S>
struct StageCopies<S, true> {
    typedef ThreadCopies<S> Type;
};

// A thread's part in the steps of a tile.
template <class S, bool GATHERED>
SHARED void fill_tile(Ring& ring, const RingTile& in, uint t) {
    typename StageCopies<S, GATHERED>::Type copies;
    copies.start(in, t);
    uint steps = in.cols / STEP;
#pragma unroll 1
    for (uint step = 0; step < steps; step++) {
        barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
        StepEnds ends(step, steps, S::GROUP / STEP);
        copies.copy(in, ring.template at<S>(ring.stage), ring.full + ring.stage, ends);
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
