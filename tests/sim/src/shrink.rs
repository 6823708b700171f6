//! Reduces a failing plan while it fails in the same way.
//!
//! This works on the serialized plan: list elements are removed, fields are set to the value in
//! [`Plan::default`], numbers and durations are reduced. Therefore this also supports new fields.
//! Candidates that are not valid plans or fail in another way are discarded.

use std::time::{Duration, Instant};

use serde_json::{Number, Value, json};

use crate::{Failure, Plan};

/// Number of seeds to try for each reduced plan, because the same failure may need another
/// schedule.
const SEEDS: u64 = 3;

/// Limits for the search.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Maximum number of runs.
    pub runs: usize,
    /// Maximum time.
    pub time: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            runs: 1000,
            time: Duration::from_secs(120),
        }
    }
}

/// Reduces the plan of a failure, using `run` to run plans.
#[must_use]
pub fn shrink<T>(
    failure: Box<Failure>,
    budget: Budget,
    run: impl Fn(&Plan) -> Result<T, Box<Failure>>,
) -> Box<Failure> {
    let mut search = Search {
        kind: failure.kind(),
        found: failure,
        runs_left: budget.runs,
        end: Instant::now() + budget.time,
        run,
    };
    search.take_usual_fields();
    // Each round reduces as much as possible. A reduction that failed before may succeed after
    // other reductions.
    while search.round() {}
    search.found
}

struct Search<R> {
    kind: String,
    found: Box<Failure>,
    runs_left: usize,
    end: Instant,
    run: R,
}

impl<T, R: Fn(&Plan) -> Result<T, Box<Failure>>> Search<R> {
    fn plan(&self) -> Value {
        serde_json::to_value(&self.found.plan).expect("plans have names and numbers only")
    }

    /// Runs a plan. If it fails in the same way, it replaces the current plan.
    fn accepts(&mut self, plan: Value) -> bool {
        let Ok(plan) = serde_json::from_value::<Plan>(plan) else {
            return false;
        };
        for more in 0..SEEDS {
            if self.runs_left == 0 || Instant::now() >= self.end {
                return false;
            }
            self.runs_left -= 1;
            let seed = plan.seed.wrapping_add(more);
            let plan = Plan {
                seed,
                ..plan.clone()
            };
            if let Err(failure) = (self.run)(&plan)
                && failure.kind() == self.kind
            {
                self.found = failure;
                return true;
            }
        }
        false
    }

    /// Resets all fields to their default value if they don't matter. This is only done once at the
    /// start, because it may increase numbers.
    fn take_usual_fields(&mut self) {
        let usual = serde_json::to_value(Plan::default()).expect("as above");
        let Value::Object(usual) = usual else {
            unreachable!("a plan has fields");
        };
        for (name, usual) in usual {
            let mut plan = self.plan();
            if name != "seed" && plan[&name] != usual {
                plan[&name] = usual;
                self.accepts(plan);
            }
        }
    }

    /// Tries all reduced plans. Returns whether any of them was accepted.
    fn round(&mut self) -> bool {
        let mut is_better = false;
        let mut at = 0;
        // When a plan was accepted, we continue at the same position in the candidates for the new
        // plan, because the first candidates have already failed for the old plan.
        while let Some(plan) = smaller(&self.plan(), 0).into_iter().nth(at) {
            match self.accepts(plan) {
                true => is_better = true,
                false => at += 1,
            }
        }
        is_better
    }
}

/// Returns values that are reduced by one step, with the largest reductions first.
fn smaller(value: &Value, depth: usize) -> Vec<Value> {
    match value {
        Value::Array(all) => {
            let without = (0..all.len()).map(|at| {
                let mut fewer = all.clone();
                fewer.remove(at);
                Value::Array(fewer)
            });
            let inner = all.iter().enumerate().flat_map(|(at, one)| {
                let with = move |less| {
                    let mut all = all.clone();
                    all[at] = less;
                    Value::Array(all)
                };
                smaller(one, depth + 1).into_iter().map(with)
            });
            without.chain(inner).collect()
        }
        Value::Object(fields) => {
            let inner = fields.iter().flat_map(|(name, one)| {
                let with = move |less| {
                    let mut fields = fields.clone();
                    fields[name] = less;
                    Value::Object(fields)
                };
                // Don't reduce the seed.
                let all = match depth == 0 && name == "seed" {
                    true => Vec::new(),
                    false => smaller(one, depth + 1),
                };
                all.into_iter().map(with)
            });
            inner.collect()
        }
        Value::Number(number) => smaller_numbers(number),
        Value::String(text) => {
            let Ok(time) = riser_units::parse_duration(text) else {
                return Vec::new();
            };
            match time >= Duration::from_micros(2) {
                true => vec![json!(format!("{}ms", time.as_micros() as f64 / 2000.0))],
                false => Vec::new(),
            }
        }
        Value::Bool(_) | Value::Null => Vec::new(),
    }
}

fn smaller_numbers(number: &Number) -> Vec<Value> {
    match number.as_u64() {
        Some(0 | u64::MAX) => Vec::new(),
        Some(1) => vec![json!(0)],
        Some(n @ 2..) => vec![json!(n / 2), json!(n - 1)],
        // Don't reduce probabilities, because this would not help.
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Fault, Protocol, Trouble};

    fn failure(plan: &Plan, why: &str) -> Box<Failure> {
        Box::new(Failure {
            plan: plan.clone(),
            at: Duration::ZERO,
            why: why.to_owned(),
        })
    }

    /// Simulates a bug that occurs if disks stall for 30 ms while two initiators, at least one over
    /// iSCSI, send three commands to two workers. It fails in another way if there is no trouble.
    fn run(plan: &Plan) -> Result<(), Box<Failure>> {
        let stalls = |t: &Trouble| {
            t.fault == Fault::StallDisks && t.until.saturating_sub(t.from).as_millis() >= 30
        };
        if plan.troubles.is_empty() {
            return Err(failure(plan, "another failure altogether"));
        }
        let fails = plan.troubles.iter().any(stalls)
            && plan.initiators.len() >= 2
            && plan.initiators.contains(&Protocol::Iscsi)
            && plan.commands >= 3
            && plan.workers >= 2;
        match fails {
            true => Err(failure(plan, &format!("block {} holds a lie", plan.seed))),
            false => Ok(()),
        }
    }

    fn large() -> Plan {
        let trouble = |from, fault| Trouble {
            from: Duration::from_micros(from),
            until: Duration::from_millis(500),
            fault,
        };
        Plan {
            workers: 4,
            initiators: vec![Protocol::Srp, Protocol::Iscsi, Protocol::Iser],
            socket_room: 16,
            troubles: vec![
                trouble(20_000, Fault::CutTcp(0.5)),
                trouble(77_777, Fault::StallDisks),
                trouble(0, Fault::StallTcp),
            ],
            ..Plan::of(7)
        }
    }

    #[test]
    fn shrinking_keeps_only_failure_causes() {
        let first = run(&large()).unwrap_err();
        let found = shrink(first, Budget::default(), run).plan;
        assert_eq!((found.workers, found.commands), (2, 3));
        assert_eq!(found.initiators.len(), 2);
        assert_eq!(found.socket_room, Plan::default().socket_room);
        assert_eq!((found.tasks, found.blocks), (0, 0));
        let [Trouble { from, until, fault }] = found.troubles[..] else {
            panic!("{found}");
        };
        assert_eq!(fault, Fault::StallDisks);
        assert!(
            from.is_zero() || from < Duration::from_micros(2),
            "{from:?}"
        );
        assert!((30..60).contains(&until.as_millis()), "{until:?}");
    }

    #[test]
    fn budget_limits_search() {
        let runs = std::cell::Cell::new(0);
        let counted = |plan: &Plan| {
            runs.set(runs.get() + 1);
            run(plan)
        };
        let budget = Budget {
            runs: 7,
            ..Budget::default()
        };
        let found = shrink(run(&large()).unwrap_err(), budget, counted);
        assert_eq!(runs.get(), 7);
        assert!(run(&found.plan).is_err());
    }
}
