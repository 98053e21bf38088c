//! Norm and rotation of query and key heads.

use super::{isa::by_isa, norm::inverse_rms, workers::Workers};
use crate::{AttentionShape, DeviceError, Row};

/// Rotary tables `[positions, half]` and the axis of each frequency.
pub(crate) struct RotaryTable {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) axes: Vec<u8>,
}

impl RotaryTable {
    /// Writes the cosines, then the sines, of every row: `[rows, 2, half]`.
    pub(crate) fn angles(
        &self,
        stage: &'static str,
        rows: &[Row],
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let half = self.axes.len();
        out.clear();
        for row in rows {
            let positions = self.cos.len() / half.max(1);
            if let Some(&position) = row.position.iter().find(|&&p| half > 0 && p as usize >= positions) {
                return Err(DeviceError::Failed {
                    stage,
                    message: format!("rotary position {position}, the table has {positions}"),
                });
            }
            for table in [&self.cos, &self.sin] {
                out.extend(
                    self.axes
                        .iter()
                        .enumerate()
                        .map(|(j, &axis)| table[row.position[axis as usize] as usize * half + j]),
                );
            }
        }
        Ok(())
    }
}

/// Norms one head, then turns it.
#[inline(always)]
fn head_body(x: &mut [f32], weight: &[f32], eps: f32, angles: &[f32]) {
    let r = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = (*x * r) * w;
    }
    turn(x, angles);
}

/// Turns entry `j` of a head with entry `j + half` by `angles` `[2, half]`, cosines first.
#[inline(always)]
pub(crate) fn turn(x: &mut [f32], angles: &[f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (low, high) = x[..2 * half].split_at_mut(half);
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (x_j, x_k) = (*a, *b);
        *a = x_j.mul_add(*cos, -(x_k * sin));
        *b = x_k.mul_add(*cos, x_j * sin);
    }
}
by_isa! { fn head(x: &mut [f32], weight: &[f32], eps: f32, angles: &[f32]) = head_body }

/// What [`qk_norm_rope`] reads besides rows.
pub(crate) struct HeadNorms<'a> {
    pub(crate) q_weight: &'a [f32],
    pub(crate) k_weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) shape: AttentionShape,
}

/// [`crate::Device::qk_norm_rope`] over the step's rows; `angles` is scratch.
pub(crate) fn qk_norm_rope(
    workers: &Workers,
    rows: &[Row],
    qg: &[f32],
    k: &mut [f32],
    q: &mut [f32],
    norms: &HeadNorms<'_>,
    table: &RotaryTable,
    angles: &mut Vec<f32>,
) -> Result<(), DeviceError> {
    let AttentionShape { heads, kv_heads, head_dim } = norms.shape;
    assert!(2 * table.axes.len() <= head_dim, "the rotation fits a head");
    table.angles("qk_norm_rope", rows, angles)?;
    let turn = 2 * table.axes.len();
    let (q_width, k_width) = (heads * head_dim, kv_heads * head_dim);
    workers.rows2(q, q_width, k, k_width, &|first, q, k| {
        for (at, (q, k)) in q.chunks_exact_mut(q_width).zip(k.chunks_exact_mut(k_width)).enumerate() {
            let angles = &angles[(first + at) * turn..][..turn];
            let qg = &qg[(first + at) * 2 * q_width..][..2 * q_width];
            for (q, qg) in q.chunks_exact_mut(head_dim).zip(qg.chunks_exact(2 * head_dim)) {
                q.copy_from_slice(&qg[..head_dim]);
                head(workers.isa, q, norms.q_weight, norms.eps, angles);
            }
            for k in k.chunks_exact_mut(head_dim) {
                head(workers.isa, k, norms.k_weight, norms.eps, angles);
            }
        }
    });
    Ok(())
}
