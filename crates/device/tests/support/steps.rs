//! Values, buffers and windows for tests of stages, inside the crate and outside.

use device::{Buffer, Device, PAGE_TOKENS, Row, Step, Window};

/// A small generator of test values; every use names its seed.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// About normal, exact in f32.
    pub(crate) fn value(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| self.next() as f64 / (1u64 << 31) as f64 - 0.5).sum();
        (sum * 1.7) as f32 as f64
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// A buffer with these rows.
pub(crate) fn filled(device: &mut dyn Device, width: usize, values: &[f64]) -> Buffer {
    let buffer = device.buffer(values.len() / width, width).expect("fits");
    device.write(buffer, 0, values).expect("fits");
    buffer
}

/// The first `n` values of a buffer.
pub(crate) fn read(device: &mut dyn Device, buffer: Buffer, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    device.read(buffer, 0, &mut out).expect("fits");
    out
}

/// A window over its own pages, from `page` on.
pub(crate) fn window(place: u32, first: usize, rows: usize, start: usize, page: u32, commit: bool) -> Window {
    let pages = (0..((start + rows).div_ceil(PAGE_TOKENS)) as u32).map(|i| page + i).collect();
    Window { place, first, rows, start, pages, parents: None, commit }
}

/// A step of text rows.
pub(crate) fn step(windows: Vec<Window>) -> Step {
    let mut rows = Vec::new();
    for window in &windows {
        rows.extend((0..window.rows).map(|row| Row { token: None, position: [window.index(row) as u32; 3] }));
    }
    Step::new(rows, windows).expect("valid")
}

/// A random tree of `rows` rows, some of them roots.
pub(crate) fn tree(noise: &mut Noise, rows: usize) -> Vec<Option<u32>> {
    (0..rows).map(|row| noise.below(row + 1).checked_sub(1).map(|parent| parent as u32)).collect()
}
