// The step tables: what begin() writes once for all launches of a step. Mirrored in
// crates/device/src/cuda/memory.rs.
#pragma once
#include "common.cuh"

struct StepRow {
    int token;         // -1: the caller wrote the embedding
    uint position[3];  // rotary t, h, w
    uint window;       // index into windows
    uint row;          // row inside the window
    uint index;        // token index: start + depth
    uint storage;      // place of its K/V in the sequence: start + row
    int parent;        // parent row inside the window, -1: the committed state
    uint ancestors;    // trees and uncommitted windows: bit j set if window row j is an ancestor or itself
    uint pad[2];
};

struct StepWindow {
    uint place;     // of the sequence in every state pool
    uint first;     // first step row
    uint rows;
    uint start;     // committed tokens before the window
    uint commit;    // 1: states advance past all rows
    uint tree;      // 1: parents are given, ancestors say who sees whom
    uint pages_at;  // first page in pages
    uint page_count;
};

// A kernel takes it by value as `StepTables step`.
struct StepTables {
    const StepRow* rows;
    const StepWindow* windows;
    const uint* pages;
    uint row_count;
    uint window_count;
};

// Page and slot of place `storage` of a window.
SHARED uint page_of(const StepTables& step, const StepWindow& window, uint storage) {
    return step.pages[window.pages_at + storage / 64];
}
