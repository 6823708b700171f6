//! Reads the tables in `xtask/cases/bench.toml`.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

/// A text of the tables, which are never freed.
pub(super) type Text = &'static str;

/// Reads the table with this name.
///
/// # Panics
/// The tables are part of this program, so they must be valid.
pub(super) fn read<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let tables = toml::from_str::<toml::Table>(include_str!("../../cases/bench.toml"));
    let table = tables.and_then(|tables| tables[name].clone().try_into());
    table.unwrap_or_else(|e| panic!("bench.toml: {name}: {e}"))
}

pub(super) fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Text, D::Error> {
    Ok(String::deserialize(from)?.leak())
}

pub(super) fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Text>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    Ok(texts.into_iter().map(|text| &*text.leak()).collect())
}
