//! The contracts over every subject at hand, end to end through public interfaces. One program, so that it
//! links once.

mod accuracy;
mod can_fail;
mod cpu;
mod demo;
mod devices;
mod evicted;
mod fake;
mod long;
mod pictures;
mod projections;
mod reference;
mod support;
mod wrapped;
