//! What can go wrong on a device.

/// An error of a device call; `stage` names the call.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Memory could not be had.
    #[error(
        "{stage}: {bytes} bytes could not be allocated on {device}; lower --ctx, --slots or --memory-limit"
    )]
    OutOfMemory {
        /// The call.
        stage: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// Device name.
        device: String,
    },
    /// The device, its driver or a kernel failed.
    #[error("{stage}: {message}")]
    Failed {
        /// The call.
        stage: &'static str,
        /// What the driver says.
        message: String,
    },
    /// A device of that name does not exist here.
    #[error("device {name:?} is not available: {reason}")]
    Unavailable {
        /// What was asked for.
        name: String,
        /// Why not, and what is.
        reason: String,
    },
}
