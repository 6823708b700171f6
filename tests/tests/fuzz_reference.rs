//! Differential fuzz targets: what we do beside small models that are written from the standards,
//! and share no code with it.

#[path = "reference/disk.rs"]
mod disk;
#[path = "reference/negotiation.rs"]
mod negotiation;
#[path = "reference/reports.rs"]
mod reports;
#[path = "reference/unit.rs"]
mod unit;
