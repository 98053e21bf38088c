//! Routes that show and do not answer (`docs/api.md` 7).

pub(crate) mod foreign;
pub(crate) mod health;
pub(crate) mod metrics;
pub(crate) mod models;
pub(crate) mod props;
pub(crate) mod slots;
pub(crate) mod tokens;
