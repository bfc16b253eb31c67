#include "ffi/testing/fake_xla.h"

#include <cstdlib>
#include <utility>

#include "ffi/testing/call_context.h"

namespace moe_lb::testing {
namespace {

XLA_FFI_Error* Failure(XLA_FFI_Error_Code code, std::string message) {
  return new XLA_FFI_Error{code, std::move(message)};
}

// ---- the function table --------------------------------------------------------

XLA_FFI_Error* ErrorCreate(XLA_FFI_Error_Create_Args* args) { return Failure(args->errc, args->message); }

// Newer headers return the error's code too. The overload with int is chosen if the field exists, so that this file
// compiles with the headers of every jaxlib.
template <typename Args>
auto SetCode(Args* args, int) -> decltype(args->errc, void()) {
  args->errc = args->error->code;
}
template <typename Args>
void SetCode(Args*, long) {}

// XLA_FFI_Error_GetMessage, and XLA_FFI_Error_GetDetails in newer headers.
template <typename Args>
void ErrorGet(Args* args) {
  args->message = args->error->message.c_str();
  SetCode(args, 0);
}

template <typename Api>
auto SetErrorGet(Api& api, int) -> decltype(api.XLA_FFI_Error_GetDetails, void()) {
  api.XLA_FFI_Error_GetDetails = &ErrorGet;
}
template <typename Api>
auto SetErrorGet(Api& api, long) -> decltype(api.XLA_FFI_Error_GetMessage, void()) {
  api.XLA_FFI_Error_GetMessage = &ErrorGet;
}

void ErrorDestroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* StreamGet(XLA_FFI_Stream_Get_Args* args) {
  args->stream = ContextOf(args->ctx).stream;
  if (args->stream == nullptr) return Failure(XLA_FFI_Error_Code_UNIMPLEMENTED, "a CPU has no stream");
  return nullptr;
}

XLA_FFI_Error* StateSet(XLA_FFI_State_Set_Args* args) {
  Context& context = ContextOf(args->ctx);
  const bool of_execution = args->stage == XLA_FFI_ExecutionStage_INITIALIZE;
  void*& state = of_execution ? context.initialized : context.state;
  if (state != nullptr) return Failure(XLA_FFI_Error_Code_FAILED_PRECONDITION, "state is set already");
  (of_execution ? context.initialized_type : context.state_type) = *args->type_id;
  state = args->state;
  return nullptr;
}

XLA_FFI_Error* StateGet(XLA_FFI_State_Get_Args* args) {
  const Context& context = ContextOf(args->ctx);
  const bool of_execution = args->stage == XLA_FFI_ExecutionStage_INITIALIZE;
  void* const state = of_execution ? context.initialized : context.state;
  if (state == nullptr) return Failure(XLA_FFI_Error_Code_NOT_FOUND, "state is not set");
  const XLA_FFI_TypeId type = of_execution ? context.initialized_type : context.state_type;
  if (type.type_id != args->type_id->type_id) {
    return Failure(XLA_FFI_Error_Code_INVALID_ARGUMENT, "state has another type");
  }
  args->state = state;
  return nullptr;
}

XLA_FFI_Error* MemoryAllocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  args->data = std::malloc(args->size);
  return nullptr;
}

XLA_FFI_Error* MemoryFree(XLA_FFI_DeviceMemory_Free_Args* args) {
  std::free(args->data);
  return nullptr;
}

XLA_FFI_Error* PoolSchedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  const Context& context = ContextOf(args->ctx);
  switch (context.pool) {
    case PoolMode::kThreads:
      context.xla->Schedule([task = args->task, data = args->data] { task(data); });
      return nullptr;
    case PoolMode::kInline:
      // XLA may run a task at once on the scheduling thread. A handler holding a lock meanwhile, or waiting for
      // a task not scheduled yet, deadlocks in this mode.
      args->task(args->data);
      return nullptr;
    case PoolMode::kNone:
      break;
  }
  return Failure(XLA_FFI_Error_Code_UNIMPLEMENTED, "no thread pool");
}

XLA_FFI_Error* PoolNumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  const Context& context = ContextOf(args->ctx);
  if (context.pool == PoolMode::kNone) return Failure(XLA_FFI_Error_Code_UNIMPLEMENTED, "no thread pool");
  *args->num_threads = static_cast<int64_t>(context.xla->num_threads());
  return nullptr;
}

XLA_FFI_Error* FutureCreate(XLA_FFI_Future_Create_Args* args) {
  args->future = new XLA_FFI_Future;
  return nullptr;
}

void Finish(XLA_FFI_Future* future, XLA_FFI_Error* error) {
  std::function<void(XLA_FFI_Error*)> then;
  {
    const std::lock_guard<std::mutex> lock(future->mutex);
    future->over = true;
    future->error = error;
    then = future->then;
  }
  // Called without the lock: `then` may end the execution, and the future is deleted before it.
  if (!then) return;
  delete future;
  then(error);
}

XLA_FFI_Error* FutureSetAvailable(XLA_FFI_Future_SetAvailable_Args* args) {
  Finish(args->future, nullptr);
  return nullptr;
}

XLA_FFI_Error* FutureSetError(XLA_FFI_Future_SetError_Args* args) {
  Finish(args->future, args->error);
  return nullptr;
}

XLA_FFI_Error* RunIdGet(XLA_FFI_RunId_Get_Args* args) {
  args->run_id = ContextOf(args->ctx).run_id;
  return nullptr;
}

XLA_FFI_Error* DeviceOrdinalGet(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = ContextOf(args->ctx).device;
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = ErrorCreate;
  SetErrorGet(api, 0);
  api.XLA_FFI_Error_Destroy = ErrorDestroy;
  api.XLA_FFI_Stream_Get = StreamGet;
  api.XLA_FFI_State_Set = StateSet;
  api.XLA_FFI_State_Get = StateGet;
  api.XLA_FFI_DeviceMemory_Allocate = MemoryAllocate;
  api.XLA_FFI_DeviceMemory_Free = MemoryFree;
  api.XLA_FFI_ThreadPool_Schedule = PoolSchedule;
  api.XLA_FFI_ThreadPool_NumThreads = PoolNumThreads;
  api.XLA_FFI_Future_Create = FutureCreate;
  api.XLA_FFI_Future_SetAvailable = FutureSetAvailable;
  api.XLA_FFI_Future_SetError = FutureSetError;
  api.XLA_FFI_RunId_Get = RunIdGet;
  api.XLA_FFI_DeviceOrdinal_Get = DeviceOrdinalGet;
  return api;
}

}  // namespace

void OnReady(XLA_FFI_Future* future, std::function<void(XLA_FFI_Error*)> then) {
  {
    const std::lock_guard<std::mutex> lock(future->mutex);
    if (!future->over) {
      future->then = std::move(then);
      return;
    }
  }
  XLA_FFI_Error* const error = future->error;
  delete future;
  then(error);
}

// ---- the runtime ---------------------------------------------------------------

FakeXla::FakeXla(size_t num_threads) : api_(MakeApi()) {
  for (size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { RunTasks(); });
}

FakeXla::~FakeXla() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void FakeXla::Schedule(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_one();
}

void FakeXla::RunTasks() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

const XLA_FFI_TypeInfo* FakeXla::type_info(XLA_FFI_TypeId id) const {
  return types_[static_cast<size_t>(id.type_id - 1)];
}

std::optional<std::string> FakeXla::Register(const Registrations& part) {
  for (const TypeRegistration& type : part.types) {
    types_.push_back(type.info);
    type.id->type_id = static_cast<int64_t>(types_.size());
  }
  for (const HandlerRegistration& handler : part.handlers) {
    for (const auto& [number, stage] : {std::pair(XLA_FFI_ExecutionStage_EXECUTE, handler.execute),
                                        std::pair(XLA_FFI_ExecutionStage_INSTANTIATE, handler.instantiate),
                                        std::pair(XLA_FFI_ExecutionStage_INITIALIZE, handler.initialize)}) {
      if (stage == nullptr) continue;
      const bool instantiate = number == XLA_FFI_ExecutionStage_INSTANTIATE;
      XLA_FFI_Metadata metadata = {};
      metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
      XLA_FFI_Metadata_Extension extension = {};
      extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
      extension.extension_base.type = XLA_FFI_Extension_Metadata;
      extension.metadata = &metadata;
      XLA_FFI_CallFrame frame = EmptyFrame(&api_, number);
      frame.extension_start = &extension.extension_base;
      const Ending ending = EndingOf(stage(&frame));
      if (!ending.ok) return std::string(handler.name) + ": " + ending.message;
      if (metadata.api_version.major_version != XLA_FFI_API_MAJOR ||
          metadata.api_version.minor_version != XLA_FFI_API_MINOR) {
        return std::string(handler.name) + ": built against another version of the FFI";
      }
      if ((metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0) {
        graph_handlers_.insert(handler.name);
      }
      const int64_t state = metadata.state_type_id.type_id;
      // XLA cannot free a state of a type registered after the handler or not at all.
      if (instantiate && (state < 1 || state > static_cast<int64_t>(types_.size()))) {
        return std::string(handler.name) + ": its state has no registered type";
      }
    }
  }
  return std::nullopt;
}

}  // namespace moe_lb::testing
