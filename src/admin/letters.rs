//! `/api/dead-letters` and `/api/retries`: rejected rows, as [`crate::letters`] knows them.

use actix_web::{
    HttpRequest, HttpResponse,
    web::{Bytes, Data, Path, Query},
};
use postrider_actors::database::letters::{Filter, Selection, Shelf};
use serde::Deserialize;
use serde_json::json;

use super::{Admin, problem};
use crate::letters::{Action, Refusal, filter, opened};

/// How many are listed where no limit is asked for.
const PAGE: u32 = 100;

/// What a list may be asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    reason: Option<String>,
    r#type: Option<String>,
    from: Option<String>,
    to: Option<String>,
    limit: Option<u32>,
    cursor: Option<i64>,
}

/// What may be moved: `ids`, or `all` that the filters let through.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    ids: Option<Vec<Id>>,
    #[serde(default)]
    all: bool,
    reason: Option<String>,
    r#type: Option<String>,
    from: Option<String>,
    to: Option<String>,
    #[serde(default)]
    dry_run: bool,
}

/// Ids that are numbers may be written as numbers.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Id {
    Text(String),
    Number(i64),
}

impl Order {
    fn selection(self) -> Result<Selection, String> {
        let Self { ids, all, reason, r#type, from, to, dry_run } = self;
        let filter = filter(reason.as_deref(), r#type, from.as_deref(), to.as_deref())?;
        match (ids, all) {
            (None, true) => Ok(Selection::All(filter)),
            (Some(_), false) if filter != Filter::default() || dry_run => {
                Err("filters and dry_run go with \"all\", not with \"ids\"".to_owned())
            }
            (Some(ids), false) => Ok(Selection::Ids(
                ids.into_iter()
                    .map(|id| match id {
                        Id::Text(text) => text,
                        Id::Number(number) => number.to_string(),
                    })
                    .collect(),
            )),
            _ => Err("give either {\"ids\": […]} or {\"all\": true}".to_owned()),
        }
    }
}

pub(super) async fn dead_letters(admin: Data<Admin>, request: HttpRequest) -> HttpResponse {
    list(&admin, &request, Shelf::Parked, "dead_letters").await
}

pub(super) async fn retries(admin: Data<Admin>, request: HttpRequest) -> HttpResponse {
    list(&admin, &request, Shelf::Retrying, "retries").await
}

async fn list(admin: &Admin, request: &HttpRequest, shelf: Shelf, name: &str) -> HttpResponse {
    let wanted = match Query::<Wanted>::from_query(request.query_string()) {
        Ok(wanted) => wanted.into_inner(),
        Err(error) => return bad(&error.to_string()),
    };
    let Wanted { reason, r#type, from, to, limit, cursor } = wanted;
    let filter = match filter(reason.as_deref(), r#type, from.as_deref(), to.as_deref()) {
        Ok(filter) => filter,
        Err(said) => return bad(&said),
    };
    match admin.letters.list(shelf, &filter, limit.unwrap_or(PAGE), cursor).await {
        Ok((page, next)) => HttpResponse::Ok().json(json!({ name: page, "next_cursor": next })),
        Err(refusal) => refused(refusal),
    }
}

pub(super) async fn show(admin: Data<Admin>, id: Path<String>) -> HttpResponse {
    match admin.letters.show(&id).await {
        Ok(found) => HttpResponse::Ok().json(found.iter().map(opened).collect::<Vec<_>>()),
        Err(refusal) => refused(refusal),
    }
}

pub(super) async fn requeue(admin: Data<Admin>, request: HttpRequest, body: Bytes) -> HttpResponse {
    act(&admin, &request, &body, Action::Requeue).await
}

pub(super) async fn discard(admin: Data<Admin>, request: HttpRequest, body: Bytes) -> HttpResponse {
    act(&admin, &request, &body, Action::Discard).await
}

async fn act(admin: &Admin, request: &HttpRequest, body: &[u8], action: Action) -> HttpResponse {
    let order: Order = match serde_json::from_slice(body) {
        Ok(order) => order,
        Err(error) => return bad(&error.to_string()),
    };
    let dry_run = order.dry_run;
    let selection = match order.selection() {
        Ok(selection) => selection,
        Err(said) => return bad(&said),
    };
    let result = match &selection {
        Selection::All(filter) if dry_run => admin.letters.count(filter).await,
        _ => {
            let by = request
                .peer_addr()
                .map_or_else(|| "admin API".to_owned(), |peer| format!("admin API, {peer}"));
            // On a task of its own: a client that hangs up half-way stops neither the work nor the line about it.
            let desk = admin.letters.clone();
            let acting = actix_rt::spawn(async move { desk.act(action, selection, &by).await });
            match acting.await {
                Ok(result) => result,
                Err(error) => return problem(500, "internal error", &error.to_string()),
            }
        }
    };
    match result {
        Ok(count) => HttpResponse::Ok().json(json!({ action.done(): count, "dry_run": dry_run })),
        Err(refusal) => refused(refusal),
    }
}

fn bad(said: &str) -> HttpResponse {
    problem(400, "bad request", said)
}

fn refused(refusal: Refusal) -> HttpResponse {
    match refusal {
        Refusal::Bad(said) => bad(&said),
        Refusal::NotFound(ids) => {
            problem(404, "not found", &format!("nothing was done; not waiting there: {}", ids.join(", ")))
        }
        Refusal::Failed(error) => problem(503, "the database cannot be asked", &error.chain()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(text: &str) -> Result<Selection, String> {
        serde_json::from_str::<Order>(text).map_err(|error| error.to_string()).and_then(Order::selection)
    }

    #[test]
    fn an_order_names_ids_or_all_and_never_both() {
        let ids = vec!["a".to_owned(), "7".to_owned()];
        assert_eq!(order(r#"{"ids": ["a", 7]}"#), Ok(Selection::Ids(ids)));
        assert!(matches!(order(r#"{"all": true, "reason": "nacked"}"#), Ok(Selection::All(_))));
        for wrong in [
            "{}",
            r#"{"all": false}"#,
            r#"{"all": true, "ids": []}"#,
            r#"{"ids": ["a"], "type": "t"}"#,
            r#"{"all": true, "reason": "no such"}"#,
            r#"{"all": true, "resaon": "nacked"}"#,
        ] {
            assert!(order(wrong).is_err(), "{wrong}");
        }
    }
}
