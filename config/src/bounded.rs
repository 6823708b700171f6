//! Numbers and sizes whose limits and defaults are part of their types, so that each key declares
//! them in place. The parser checks values against them, and the schema shows them.

use std::borrow::Cow;

use riser_units::show_size;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::value::Size;

/// Default value of keys without a default.
pub(super) const NO_DEFAULT: u64 = u64::MAX;

/// A whole number from `MIN` to `MAX`. If the key is not set, we use `DEFAULT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Number<const MIN: u64, const MAX: u64, const DEFAULT: u64>(u64);

impl<const MIN: u64, const MAX: u64, const DEFAULT: u64> Number<MIN, MAX, DEFAULT> {
    /// Creates a number for writing. The value was checked when it was read.
    pub(super) const fn of(number: u64) -> Self {
        Self(number)
    }

    pub(super) const fn get(self) -> u64 {
        self.0
    }
}

impl<const MIN: u64, const MAX: u64, const DEFAULT: u64> Default for Number<MIN, MAX, DEFAULT> {
    fn default() -> Self {
        const {
            assert!(
                MIN <= DEFAULT && DEFAULT <= MAX,
                "a default within its limits"
            );
        }
        Self(DEFAULT)
    }
}

impl<'de, const MIN: u64, const MAX: u64, const DEFAULT: u64> Deserialize<'de>
    for Number<MIN, MAX, DEFAULT>
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u64::deserialize(deserializer)? {
            number if (MIN..=MAX).contains(&number) => Ok(Self(number)),
            number => {
                let message = format!("must be from {MIN} to {MAX}, not {number}");
                Err(de::Error::custom(message))
            }
        }
    }
}

impl<const MIN: u64, const MAX: u64, const DEFAULT: u64> JsonSchema for Number<MIN, MAX, DEFAULT> {
    fn schema_name() -> Cow<'static, str> {
        format!("Number_{MIN}_{MAX}_{DEFAULT}").into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let mut schema = json_schema!({ "type": "integer", "minimum": MIN, "maximum": MAX });
        if DEFAULT != NO_DEFAULT {
            schema.insert("default".to_owned(), DEFAULT.into());
        }
        schema
    }
}

/// A byte count from `MIN` to `MAX`, which must be a multiple of `STEP`. If the key is not set, we
/// use `DEFAULT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes<const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64>(u64);

impl<const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64>
    Bytes<MIN, MAX, STEP, DEFAULT>
{
    /// Creates a size for writing. The value was checked when it was read.
    pub(super) const fn of(bytes: u64) -> Self {
        Self(bytes)
    }

    pub(super) const fn get(self) -> u64 {
        self.0
    }

    fn limits() -> String {
        let range = format!("{} to {}", show_size(MIN), show_size(MAX));
        match STEP {
            1 => range,
            step => format!("{range}, in whole {step}-byte blocks"),
        }
    }
}

impl<const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64> Default
    for Bytes<MIN, MAX, STEP, DEFAULT>
{
    fn default() -> Self {
        const {
            assert!(
                MIN <= DEFAULT && DEFAULT <= MAX,
                "a default within its limits"
            );
        }
        Self(DEFAULT)
    }
}

impl<const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64> Serialize
    for Bytes<MIN, MAX, STEP, DEFAULT>
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Size(self.0).serialize(serializer)
    }
}

impl<'de, const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64> Deserialize<'de>
    for Bytes<MIN, MAX, STEP, DEFAULT>
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Size::deserialize(deserializer)?.0;
        match (MIN..=MAX).contains(&bytes) && bytes.is_multiple_of(STEP) {
            true => Ok(Self(bytes)),
            false => Err(de::Error::custom(format!(
                "must be from {}",
                Self::limits()
            ))),
        }
    }
}

impl<const MIN: u64, const MAX: u64, const STEP: u64, const DEFAULT: u64> JsonSchema
    for Bytes<MIN, MAX, STEP, DEFAULT>
{
    fn schema_name() -> Cow<'static, str> {
        format!("Bytes_{MIN}_{MAX}_{STEP}_{DEFAULT}").into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = Size::json_schema(generator);
        schema.insert("x-limits".to_owned(), Self::limits().into());
        if DEFAULT != NO_DEFAULT {
            schema.insert("default".to_owned(), show_size(DEFAULT).into());
        }
        schema
    }
}
