//! Activations: one plane of f32 rows per [`Buffer`].

use crate::{Buffer, DeviceError, step::check_copy};

/// Rows of one width.
#[derive(Default)]
pub(crate) struct Plane {
    pub(crate) width: usize,
    pub(crate) values: Vec<f32>,
}

impl Plane {
    /// The first `rows` rows.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.width]
    }

    /// The first `rows` rows.
    pub(crate) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.width]
    }

    /// `rows` rows from row `at` on.
    pub(crate) fn span(
        &mut self,
        stage: &'static str,
        at: usize,
        rows: usize,
    ) -> Result<&mut [f32], DeviceError> {
        let (width, held) = (self.width, self.values.len());
        self.values.get_mut(at * width..(at + rows) * width).ok_or_else(|| {
            let message = format!("{rows} rows from row {at} on of a buffer of {} rows", held / width.max(1));
            DeviceError::Failed { stage, message }
        })
    }
}

/// All planes of a device. A stage takes its outputs out, so that inputs can be read meanwhile, and puts them
/// back.
#[derive(Default)]
pub(crate) struct Planes(Vec<Plane>);

impl Planes {
    /// Adds a plane.
    pub(crate) fn add(&mut self, width: usize, values: Vec<f32>) -> Buffer {
        self.0.push(Plane { width, values });
        Buffer(self.0.len() as u32 - 1)
    }

    /// The plane of a buffer.
    pub(crate) fn get(&self, buffer: Buffer) -> &Plane {
        &self.0[buffer.0 as usize]
    }

    /// The plane of a buffer.
    pub(crate) fn get_mut(&mut self, buffer: Buffer) -> &mut Plane {
        &mut self.0[buffer.0 as usize]
    }

    /// The first `rows` rows of an input.
    ///
    /// # Panics
    /// If the buffer has fewer, or is an output of the same stage.
    pub(crate) fn rows(&self, buffer: Buffer, rows: usize) -> &[f32] {
        self.get(buffer).rows(rows)
    }

    /// Runs `work` on an output while all other planes can be read.
    pub(crate) fn with<R>(&mut self, out: Buffer, work: impl FnOnce(&mut Plane, &Self) -> R) -> R {
        let mut plane = std::mem::take(self.get_mut(out));
        let result = work(&mut plane, self);
        *self.get_mut(out) = plane;
        result
    }

    /// [`crate::Device::copy_values`].
    pub(crate) fn copy_values(
        &mut self,
        from: Buffer,
        first: usize,
        rows: usize,
        to: Buffer,
        at: usize,
    ) -> Result<(), DeviceError> {
        let (values, width) = (rows * self.get(from).width, self.get(to).width);
        check_copy(from, to, values, width)?;
        self.with(to, |to, planes| {
            let source = planes.get(from);
            let source = &source.values[first * source.width..][..values];
            to.values[at * width..][..values].copy_from_slice(source);
        });
        Ok(())
    }

    /// Takes an output out; [`Self::put`] must follow.
    pub(crate) fn take(&mut self, out: Buffer) -> Plane {
        std::mem::take(self.get_mut(out))
    }

    /// Puts an output back.
    pub(crate) fn put(&mut self, out: Buffer, plane: Plane) {
        *self.get_mut(out) = plane;
    }

    /// Values held.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|plane| plane.values.len()).sum()
    }
}
