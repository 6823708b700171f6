//! Differential fuzz targets: compare our implementation with small models that are based on the
//! standards and don't share any code with it.

#[path = "reference/disk.rs"]
mod disk;
#[path = "reference/negotiation.rs"]
mod negotiation;
#[path = "reference/reports.rs"]
mod reports;
#[path = "reference/unit.rs"]
mod unit;
