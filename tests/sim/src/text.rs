//! Plans as YAML, for reports, files and manual changes.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Plan;

impl Plan {
    /// Parses a plan.
    ///
    /// # Errors
    /// Returns an error with its location if this is not a valid plan.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_saphyr::from_str(text).map_err(|error| error.to_string())
    }
}

/// Formats the plan as YAML, without fields that are equal to [`Plan::default`].
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [mut plan, usual] = [self, &Self::default()].map(json);
        if let (Value::Object(plan), Value::Object(usual)) = (&mut plan, usual) {
            plan.retain(|name, value| name == "seed" || usual.get(name) != Some(value));
        }
        let text = serde_saphyr::to_string(&plan).map_err(|_| fmt::Error)?;
        f.write_str(text.trim_end())
    }
}

fn json<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("plans have names and numbers only")
}

/// Returns the serialized name of an enum variant.
pub(crate) fn variant_of<'a, T: Serialize + Deserialize<'a>>(value: &T) -> &'static str {
    let name = match json(value) {
        Value::Object(fields) => fields.into_iter().next().map(|(name, _)| name),
        Value::String(name) => Some(name),
        _ => None,
    };
    let name = name.expect("an enum");
    let mut all = variants_of::<T>().iter();
    all.find(|one| **one == name).expect("one of its variants")
}

/// Returns the serialized names of all variants of an enum.
pub(crate) fn variants_of<'a, T: Deserialize<'a>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // This always fails, but only after setting the names.
    let _ = T::deserialize(Variants(&mut names));
    names
}

/// A deserializer that only captures the names of the variants.
struct Variants<'n>(&'n mut &'static [&'static str]);

impl<'de> serde::Deserializer<'de> for Variants<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V>(self, _: V) -> Result<V::Value, Self::Error>
    where
        V: serde::de::Visitor<'de>,
    {
        Err(serde::de::Error::custom("missing value"))
    }

    fn deserialize_enum<V>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error>
    where
        V: serde::de::Visitor<'de>,
    {
        *self.0 = variants;
        Err(serde::de::Error::custom("missing value"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Durations with units, without loss of precision.
pub(crate) mod duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        let nanos = time.as_nanos();
        let text = match (nanos % 1_000_000_000, nanos % 1_000_000) {
            (0, _) => format!("{}s", time.as_secs()),
            (_, 0) => format!("{}ms", nanos / 1_000_000),
            (_, rest) => {
                let number = format!("{}.{rest:06}", nanos / 1_000_000);
                format!("{}ms", number.trim_end_matches('0'))
            }
        };
        to.serialize_str(&text)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)?;
        riser_units::parse_duration(&text).map_err(de::Error::custom)
    }
}

/// A path MTU in bytes.
pub(crate) mod mtu {
    use riser_transport::verbs::Mtu;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(mtu: &Mtu, to: S) -> Result<S::Ok, S::Error> {
        mtu.bytes().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mtu, D::Error> {
        let bytes = u32::deserialize(from)?;
        let mut all = Mtu::ALL.into_iter();
        let found = all.find(|mtu| mtu.bytes() == bytes);
        found.ok_or_else(|| de::Error::custom(format!("invalid path MTU {bytes}")))
    }
}

/// A list of path MTUs in bytes.
pub(crate) mod mtus {
    use riser_transport::verbs::Mtu;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(mtus: &[Mtu; 2], to: S) -> Result<S::Ok, S::Error> {
        mtus.map(Mtu::bytes).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[Mtu; 2], D::Error> {
        let numbers = <[u32; 2]>::deserialize(from)?;
        let of = |bytes| Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes);
        match numbers.map(of) {
            [Some(one), Some(other)] => Ok([one, other]),
            _ => Err(de::Error::custom(format!("invalid path MTUs {numbers:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nics::{NicFault, Place};
    use crate::plan::{Fault, Protocol};

    #[test]
    fn written_plans_are_parsed_again() {
        for seed in 1..500 {
            let plan = Plan::of(seed);
            let text = plan.to_string();
            assert_eq!(Plan::parse(&text).as_ref(), Ok(&plan), "{text}");
        }
    }

    #[test]
    fn file_omits_default_values() {
        let text = "initiators: [srp, iscsi]\ntimeout: 1s\ntroubles:\n\
                    - {from: 1.5ms, until: 2s, fault: stall-tcp}\n\
                    - {from: 0s, until: 1s, fault: {partition: 1}}\n";
        let plan = Plan::parse(text).unwrap();
        assert_eq!(plan.initiators, [Protocol::Srp, Protocol::Iscsi]);
        assert_eq!(plan.troubles[1].fault, Fault::Partition(1));
        assert_eq!(plan.blocks, Plan::default().blocks);
        let text = plan.to_string();
        assert!(!text.contains("blocks") && text.contains("1.5ms"), "{text}");
        assert_eq!(Plan::default().to_string(), "seed: 1");
        assert!(Plan::parse("blocs: 3").unwrap_err().contains("blocs"));
    }

    #[test]
    fn faults_have_names() {
        assert_eq!(Fault::FailDisks(0.5).kind(), "fail-disks");
        let place = Place::Initiator(1);
        assert_eq!(Fault::Nic(place, NicFault::Unplug).kind(), "unplug");
        assert_eq!(Fault::Deaf(place).kind(), "deaf");
        assert!(Fault::kinds().contains(&"power-cut"));
    }

    #[test]
    fn plan_has_only_wanted_troubles() {
        let mut count = 0;
        for seed in 1..100 {
            let plan = Plan::drawn(seed, |fault| fault.kind() == "stall-tcp");
            count += plan.troubles.len();
            assert!(plan.troubles.iter().all(|t| t.fault == Fault::StallTcp));
        }
        assert!(count > 100, "{count}");
    }
}
