//! Tests of the reference device over whole stages.
