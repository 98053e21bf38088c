//! States of one delta-net layer: storage, snapshots, and the inputs kept of uncommitted windows.
//!
//! A recurrent state `[Hv, Dk, Dv]` is kept in strips of [`STRIP`] value columns, `[Hv, strips, Dk, STRIP]`:
//! the rule works column by column, so a strip stays in the nearest cache while all tokens of a window pass
//! over it. Columns beyond `Dv` are zeros. A convolution state is `[conv_taps - 1, C]`, oldest row first.

use crate::{DeltaShape, DeltaState, DeviceError, VectorRef};

/// Value columns that share a strip.
pub(crate) const STRIP: usize = 16;
/// Most taps of the convolution.
pub(crate) const TAPS_MAX: usize = 8;

/// One row of a strip: the values of its columns at one key index.
pub(crate) type Lanes = [f32; STRIP];

/// What is kept of one place's last uncommitted window, row by row: enough to replay it without queries.
#[derive(Default)]
pub(crate) struct Kept {
    /// Rows that can be replayed.
    pub(crate) rows: usize,
    /// Convolution inputs `[rows, C]`.
    pub(crate) conv: Vec<f32>,
    /// Normalized keys `[rows, Hk, Dk]`.
    pub(crate) k: Vec<f32>,
    /// Values `[rows, Hv, Dv]`.
    pub(crate) v: Vec<f32>,
    /// Decays, then betas: `[rows, 2, Hv]`.
    pub(crate) gates: Vec<f32>,
}

impl Kept {
    /// Bytes held.
    fn bytes(&self) -> usize {
        4 * (self.conv.capacity() + self.k.capacity() + self.v.capacity() + self.gates.capacity())
    }
}

/// States of `places` sequences and snapshots of one layer.
pub(crate) struct States {
    pub(crate) shape: DeltaShape,
    pub(crate) recurrent: Vec<Lanes>,
    pub(crate) conv: Vec<f32>,
    pub(crate) kept: Vec<Kept>,
    /// The layer's taps as `[conv_taps, C]`, made at the first convolution from this vector.
    pub(crate) taps: Option<(VectorRef, Vec<f32>)>,
}

fn failed(stage: &'static str, message: String) -> DeviceError {
    DeviceError::Failed { stage, message }
}

impl States {
    /// Zeros.
    pub(crate) fn new(shape: DeltaShape, places: usize) -> Result<Self, DeviceError> {
        let stage = "state_pool";
        if shape.conv_taps == 0 || shape.conv_taps > TAPS_MAX {
            let message =
                format!("{} convolution taps have no kernel; supported: 1 to {TAPS_MAX}", shape.conv_taps);
            return Err(failed(stage, message));
        }
        let fits = shape.key_heads > 0 && shape.value_heads.is_multiple_of(shape.key_heads);
        if !fits || shape.key_dim == 0 || shape.value_dim == 0 {
            return Err(failed(stage, format!("{shape:?} is not a delta-net shape")));
        }
        let strips = shape.value_heads * shape.value_dim.div_ceil(STRIP);
        Ok(Self {
            shape,
            recurrent: super::zeros(stage, places.saturating_mul(strips * shape.key_dim))?,
            conv: super::zeros(stage, places.saturating_mul(shape.conv()))?,
            kept: (0..places).map(|_| Kept::default()).collect(),
            taps: None,
        })
    }

    /// Strips of one place.
    pub(crate) fn strips(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim.div_ceil(STRIP)
    }

    /// Strip rows of one place.
    pub(crate) fn recurrent_len(&self) -> usize {
        self.strips() * self.shape.key_dim
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.recurrent.len() * STRIP + self.conv.len())
            + self.kept.iter().map(Kept::bytes).sum::<usize>()
    }

    /// Refuses a place outside the pool.
    pub(crate) fn check(&self, stage: &'static str, place: u32) -> Result<usize, DeviceError> {
        let (place, places) = (place as usize, self.kept.len());
        if place < places { Ok(place) } else { Err(failed(stage, format!("place {place} of {places}"))) }
    }

    /// The convolution state of a place.
    pub(crate) fn conv_mut(&mut self, place: usize) -> &mut [f32] {
        let len = self.shape.conv();
        &mut self.conv[place * len..][..len]
    }

    fn recurrent_mut(&mut self, place: usize) -> &mut [Lanes] {
        let len = self.recurrent_len();
        &mut self.recurrent[place * len..][..len]
    }

    /// Zeros a place.
    pub(crate) fn clear(&mut self, place: u32) -> Result<(), DeviceError> {
        let place = self.check("state_clear", place)?;
        self.recurrent_mut(place).fill([0.0; STRIP]);
        self.conv_mut(place).fill(0.0);
        self.kept[place].rows = 0;
        Ok(())
    }

    /// Copies a place over another; inputs kept at the target are dropped.
    pub(crate) fn copy(&mut self, from: u32, to: u32) -> Result<(), DeviceError> {
        let (from, to) = (self.check("state_copy", from)?, self.check("state_copy", to)?);
        let (recurrent, conv) = (self.recurrent_len(), self.shape.conv());
        self.recurrent.copy_within(from * recurrent..(from + 1) * recurrent, to * recurrent);
        self.conv.copy_within(from * conv..(from + 1) * conv, to * conv);
        self.kept[to].rows = 0;
        Ok(())
    }

    /// Where value `[head, i, j]` lies: strip row inside the place, and lane.
    fn locate(&self, at: usize) -> (usize, usize) {
        let DeltaShape { key_dim, value_dim, .. } = self.shape;
        let (head, i, j) = (at / (key_dim * value_dim), at / value_dim % key_dim, at % value_dim);
        let strip = head * value_dim.div_ceil(STRIP) + j / STRIP;
        (strip * key_dim + i, j % STRIP)
    }

    /// Reads a place.
    pub(crate) fn read(&self, place: u32) -> Result<DeltaState, DeviceError> {
        let place = self.check("state_read", place)?;
        let (recurrent, conv) = (self.recurrent_len(), self.shape.conv());
        let value = |at: usize| {
            let (row, lane) = self.locate(at);
            self.recurrent[place * recurrent + row][lane] as f64
        };
        Ok(DeltaState {
            recurrent: (0..self.shape.recurrent()).map(value).collect(),
            conv: self.conv[place * conv..][..conv].iter().map(|&x| x as f64).collect(),
        })
    }

    /// Writes a place, rounding to f32.
    pub(crate) fn write(&mut self, place: u32, state: &DeltaState) -> Result<(), DeviceError> {
        let stage = "state_write";
        let place = self.check(stage, place)?;
        let (found, expected) =
            ((state.recurrent.len(), state.conv.len()), (self.shape.recurrent(), self.shape.conv()));
        if found != expected {
            let message = format!("recurrent and convolution values: {found:?} found, {expected:?} expected");
            return Err(failed(stage, message));
        }
        let base = place * self.recurrent_len();
        for (at, &value) in state.recurrent.iter().enumerate() {
            let (row, lane) = self.locate(at);
            self.recurrent[base + row][lane] = value as f32;
        }
        for (to, &from) in self.conv_mut(place).iter_mut().zip(&state.conv) {
            *to = from as f32;
        }
        self.kept[place].rows = 0;
        Ok(())
    }

    /// Refuses rows that the place's last uncommitted window does not have, or that do not ascend.
    pub(crate) fn check_keep(&self, place: u32, rows: &[usize]) -> Result<usize, DeviceError> {
        let at = self.check("state_keep", place)?;
        let held = self.kept[at].rows;
        let ordered = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if ordered && rows.last().is_none_or(|&last| last < held) {
            return Ok(at);
        }
        Err(failed(
            "state_keep",
            format!("rows {rows:?} of place {place}, whose window has {held}; rows ascend"),
        ))
    }
}
