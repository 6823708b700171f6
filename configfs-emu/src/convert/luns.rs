//! LUNs of the targets in a document.

use serde_json::Value;

/// Returns the backend name for a LUN in a target or rule.
pub(crate) fn backend(lun: &Value) -> Option<&str> {
    lun.as_str().or(lun["backend"].as_str())
}

/// Removes a LUN from a target and its rules. Returns false if the target doesn't have this LUN.
pub(crate) fn remove_lun(target: &mut Value, number: &str) -> bool {
    let Some(removed) = target["luns"]
        .as_object_mut()
        .and_then(|l| l.shift_remove(number))
    else {
        return false;
    };
    let name = backend(&removed);
    let rest = target["luns"].as_object().cloned().unwrap_or_default();
    let is_left = rest.values().any(|lun| backend(lun) == name);
    for rule in target["access"].as_array_mut().into_iter().flatten() {
        match &mut rule["luns"] {
            Value::Array(numbers) => numbers.retain(|n| n.as_u64() != number.parse().ok()),
            Value::Object(luns) if !is_left => luns.retain(|_, lun| backend(lun) != name),
            _ => {}
        }
        // The key may have been added by the index operation.
        if rule["luns"].is_null()
            && let Some(rule) = rule.as_object_mut()
        {
            rule.shift_remove("luns");
        }
    }
    true
}
