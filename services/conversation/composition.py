"""The parts of a conversation service, put together on a bus and a pool."""

from pathlib import Path

from services.conversation.archive import Archive
from services.conversation.contexts import Contexts
from services.conversation.conversation_store import ConversationStore
from services.conversation.conversation_verbs import ConversationVerbs
from services.conversation.conversations import Conversations
from services.conversation.figures import Figures
from services.conversation.guards import Guards
from services.conversation.history_cache import HistoryCache
from services.conversation.input_check import InputCheck
from services.conversation.marks import QueuedMarks
from services.conversation.prompts import load_models
from services.conversation.queueing import Queueing
from services.conversation.quota_store import QuotaStore
from services.conversation.quotas import Quotas
from services.conversation.sending import Sender
from services.conversation.service import ConversationService
from services.conversation.settings import ConversationSettings
from services.conversation.shards import Shards
from services.conversation.store import Store
from services.conversation.verbs import Verbs
from shared.bus import Bus
from shared.catalog import Catalog, parse_catalog
from shared.errors import ConfigError
from shared.log_store import LogStore
from shared.storage import Pool
from shared.subjects import Names
from shared.telemetry import Journal, Log, Metrics
from shared.valkey import Valkey


def read_catalog(path: Path) -> Catalog:
    """Raises ConfigError."""
    try:
        return parse_catalog(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the model catalog {path} cannot be read: {error.strerror}. Check CHORUS_CATALOG."
        ) from error


def compose(
    settings: ConversationSettings, catalog: Catalog, *, bus: Bus, pool: Pool, metrics: Metrics, log: Log
) -> ConversationService:
    """A service that is not started; raises ModelFileError for a model file without a usable tokenizer."""
    names, name = Names(settings.region), f"conversation/{settings.name}"
    figures, journal = Figures(metrics), Journal(bus, Names(settings.region), "conversation", metrics)
    store, logs = Store(pool), LogStore(bus, names)
    lines = ConversationStore(store)
    queueing, shards = Queueing(bus, logs), Shards(bus, names, settings.log_shards)
    valkey = _valkey(settings, figures, journal)
    quota_store = None if valkey is None else QuotaStore(valkey, settings.region)
    cache = HistoryCache(valkey, settings.region, figures)
    quotas = Quotas(quota_store, catalog, settings.tokens_per_min, figures)
    archive = Archive(store=store, quotas=quotas, bus=bus, journal=journal, figures=figures, log=log)
    marks = QueuedMarks(store, log)
    models = load_models(catalog)
    sender = Sender(
        name=name,
        names=names,
        models=models,
        store=store,
        logs=logs,
        contexts=Contexts(store, logs, cache),
        conversations=Conversations(name=name, names=names, store=lines, logs=logs, bus=bus, journal=journal),
        check=InputCheck(bus, names, journal, figures, fail_open=settings.safety_fail_open),
        quotas=quotas,
        mini=None if catalog.mini is None else models[catalog.mini.id],
        queueing=queueing,
        shards=shards,
        marks=marks,
        archive=archive,
        journal=journal,
        figures=figures,
        log=log,
        isolate_tenants=settings.isolate_tenants,
    )
    guards = Guards(
        name=name,
        names=names,
        store=store,
        logs=logs,
        bus=bus,
        queueing=queueing,
        archive=archive,
        journal=journal,
        figures=figures,
        log=log,
    )
    verbs = Verbs(
        name=name,
        names=names,
        store=store,
        logs=logs,
        bus=bus,
        archive=archive,
        journal=journal,
        cache=cache,
        log_shards=settings.log_shards,
    )
    conversations = ConversationVerbs(
        store=lines,
        logs=logs,
        shards=shards,
        model=models[catalog.default.id],
        stop=verbs.stop,
        send=sender.send,
        cache=cache,
        journal=journal,
    )
    return ConversationService(
        models=tuple(models),
        log_shards=settings.log_shards,
        names=names,
        bus=bus,
        pool=pool,
        store=store,
        sender=sender,
        verbs=verbs,
        conversations=conversations,
        archive=archive,
        guards=guards,
        marks=marks,
        shards=shards,
        valkey=valkey,
        journal=journal,
        figures=figures,
        log=log,
    )


def _valkey(settings: ConversationSettings, figures: Figures, journal: Journal) -> Valkey | None:
    """Told of in the journal when it goes and when it is back; nobody waits for it."""
    if not settings.redis_url:
        return None

    def changed(away: bool, why: str) -> None:
        figures.valkey_away.set(away)
        journal.note("valkey_away" if away else "valkey_back", why=why)

    return Valkey(settings.redis_url.reveal(), changed=changed)
